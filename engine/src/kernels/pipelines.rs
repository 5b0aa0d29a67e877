//! Pipelines, one a variant: compiled on first use, or all that a rehearsed step wants at once, on all cores; and kept on disk
//! where the backend has a cache of them.
//!
//! Owned by the encoder. In a rehearsal a kernel is only noted: the step records nothing, and what it would have run is
//! compiled at the end.

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::cubecl::future::block_on;
use burn::tensor::wgpu::wgpu;
use rayon::prelude::*;
use shaders::{Binding, Shader, Variant};

use super::gpu::Gpu;
use super::image::texel_format;
use crate::ops::DeviceError;

/// A kernel to dispatch.
#[derive(Clone, Debug)]
pub struct Kernel {
    pub(super) id: usize,
    pub(super) name: &'static str,
    /// With the weights' format, for profiles.
    pub(super) title: String,
    /// `None` in a rehearsal.
    pub(super) compiled: Option<Compiled>,
}

/// What the driver made of a variant.
#[derive(Clone, Debug)]
pub(super) struct Compiled {
    pub(super) pipeline: wgpu::ComputePipeline,
    pub(super) layout: wgpu::BindGroupLayout,
}

/// Directory whose `<kernel>.wgsl` files replace the built-in ones, for work on kernels.
const SHADER_DIR_VARIABLE: &str = "PAGODA_SHADER_DIR";
/// Bytes of the checksum before the driver's data.
const CHECKSUM_BYTES: usize = 32;
/// A larger file is not one of ours.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// All pipelines of a device.
pub(super) struct Pipelines {
    gpu: Arc<Gpu>,
    kernels: HashMap<Variant, Kernel>,
    /// What a rehearsal wants and is not there.
    wanted: Option<Vec<Variant>>,
    on_disk: Option<OnDisk>,
}

impl Pipelines {
    pub(super) fn new(gpu: Arc<Gpu>) -> Self {
        Self { gpu, kernels: HashMap::new(), wanted: None, on_disk: None }
    }

    /// Takes what an earlier run left in `directory`, and leaves there what this one compiles. Whatever is wrong with the
    /// directory costs time and no more.
    pub(super) fn keep_in(&mut self, directory: &Path) {
        self.on_disk = OnDisk::open(&self.gpu, directory);
    }

    /// Whether steps are rehearsed.
    pub(super) fn is_rehearsing(&self) -> bool {
        self.wanted.is_some()
    }

    /// From now on kernels are noted and not compiled.
    pub(super) fn start_rehearsal(&mut self) {
        self.wanted = Some(Vec::new());
    }

    /// Compiles what was noted, on all cores.
    ///
    /// # Errors
    /// When a shader does not compile: the message holds naga's or the driver's words.
    pub(super) fn finish_rehearsal(&mut self) -> Result<(), DeviceError> {
        let wanted = self.wanted.take().unwrap_or_default();
        let compiled = wanted.par_iter().map(|variant| self.compile(variant)).collect::<Result<Vec<_>, _>>()?;
        tracing::debug!(count = compiled.len(), "kernels are compiled");
        for (variant, compiled) in wanted.iter().zip(compiled) {
            self.insert(variant, compiled);
        }
        if let Some(on_disk) = &mut self.on_disk {
            on_disk.save();
        }
        Ok(())
    }

    /// The kernel of a variant, compiled on first use.
    ///
    /// # Errors
    /// As [`Self::finish_rehearsal`].
    pub(super) fn kernel(&mut self, variant: &Variant) -> Result<Kernel, DeviceError> {
        if let Some(kernel) = self.kernels.get(variant) {
            return Ok(kernel.clone());
        }
        if let Some(wanted) = &mut self.wanted {
            if !wanted.contains(variant) {
                wanted.push(variant.clone());
            }
            return Ok(Kernel { id: usize::MAX, name: variant.shader.name, title: String::new(), compiled: None });
        }
        let compiled = self.compile(variant)?;
        Ok(self.insert(variant, compiled))
    }

    fn insert(&mut self, variant: &Variant, compiled: Compiled) -> Kernel {
        let title = match variant.values.get("FORMAT") {
            Some(shaders::Value::Word(format)) => format!("{} {format}", variant.shader.name),
            _ => variant.shader.name.to_owned(),
        };
        let (id, name) = (self.kernels.len(), variant.shader.name);
        let kernel = Kernel { id, name, title, compiled: Some(compiled) };
        self.kernels.insert(variant.clone(), kernel.clone());
        kernel
    }

    fn compile(&self, variant: &Variant) -> Result<Compiled, DeviceError> {
        let label = &variant.label();
        let refused = |reason: String| DeviceError::Refused { what: format!("kernel {label}"), reason };
        let source = match overriding_text(variant.shader) {
            Some(text) => text.map_err(refused)?,
            None => variant.render().map_err(|error| refused(error.to_string()))?,
        };
        let device = &self.gpu.device;
        // What naga refuses is the one kind of error, what a backend or a driver makes nothing of is the other.
        let scopes =
            [wgpu::ErrorFilter::Validation, wgpu::ErrorFilter::Internal].map(|kind| device.push_error_scope(kind));
        let descriptor =
            wgpu::ShaderModuleDescriptor { label: Some(label), source: wgpu::ShaderSource::Wgsl(source.into()) };
        // SAFETY: the checks left out guard against out-of-range indices and endless loops. The catalogue's kernels index
        // within bounds that their wrappers check and the poison and guard tests hold; every loop counts to a parameter.
        let module = unsafe { device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked()) };
        let layout = bind_group_layout(device, variant);
        let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(label),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(label),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                constants: &[],
                zero_initialize_workgroup_memory: false,
            },
            cache: self.on_disk.as_ref().map(|on_disk| &on_disk.cache),
        });
        // The last is the first to go.
        let errors: Vec<_> = scopes.into_iter().rev().filter_map(|scope| block_on(scope.pop())).collect();
        if let Some(error) = errors.first() {
            return Err(refused(error.to_string()));
        }
        self.gpu.check()?;
        Ok(Compiled { pipeline, layout })
    }
}

impl Drop for Pipelines {
    /// Keeps what was compiled after the rehearsal, too.
    fn drop(&mut self) {
        if let Some(on_disk) = self.on_disk.as_mut().filter(|_| self.gpu.check().is_ok()) {
            on_disk.save();
        }
    }
}

/// The driver's cache of pipelines and its file: a checksum, then the driver's data.
struct OnDisk {
    cache: wgpu::PipelineCache,
    path: PathBuf,
    /// Checksum of what the file holds.
    saved: Option<[u8; CHECKSUM_BYTES]>,
}

impl OnDisk {
    /// `None` where the backend has no such cache.
    fn open(gpu: &Gpu, directory: &Path) -> Option<Self> {
        if !gpu.device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return None;
        }
        let key = wgpu::util::pipeline_cache_key(&gpu.device.adapter_info())?;
        // A cache never forgets: each release begins its own.
        let path = directory.join(format!("{key}_{}", env!("CARGO_PKG_VERSION")));
        let data = read(&path);
        let descriptor =
            wgpu::PipelineCacheDescriptor { label: Some("pipelines"), data: data.as_deref(), fallback: true };
        let scope = gpu.device.push_error_scope(wgpu::ErrorFilter::Validation);
        // SAFETY: the data is what `PipelineCache::get_data` gave for this key, written by `save` below: the file's name
        // holds the key, and its checksum tells a file that was cut or changed. wgpu and the driver check its header for
        // another driver's.
        let cache = unsafe { gpu.device.create_pipeline_cache(&descriptor) };
        if let Some(error) = block_on(scope.pop()) {
            tracing::warn!(%error, path = %path.display(), "pipelines are not kept");
            return None;
        }
        Some(Self { cache, path, saved: data.map(|data| *blake3::hash(&data).as_bytes()) })
    }

    /// Writes the cache where it has changed.
    fn save(&mut self) {
        let Some(data) = self.cache.get_data() else { return };
        let checksum = *blake3::hash(&data).as_bytes();
        if self.saved == Some(checksum) {
            return;
        }
        match write(&self.path, &checksum, &data) {
            Ok(()) => self.saved = Some(checksum),
            Err(error) => tracing::debug!(%error, path = %self.path.display(), "pipelines are not kept"),
        }
    }
}

/// The data of a whole file.
fn read(path: &Path) -> Option<Vec<u8>> {
    let metadata = std::fs::metadata(path).ok()?;
    if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
        return None;
    }
    let mut file = std::fs::read(path).ok()?;
    let data = file.split_off(CHECKSUM_BYTES.min(file.len()));
    let is_whole = *blake3::hash(&data).as_bytes() == *file;
    if !is_whole {
        tracing::warn!(path = %path.display(), "kept pipelines are broken: their checksum differs; they are made again");
    }
    is_whole.then_some(data)
}

/// Another process sees the old file or the new one.
fn write(path: &Path, checksum: &[u8], data: &[u8]) -> std::io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(directory)?;
    let mut new = tempfile::NamedTempFile::new_in(directory)?;
    new.write_all(checksum)?;
    new.write_all(data)?;
    new.persist(path).map(drop).map_err(|error| error.error)
}

fn overriding_text(shader: &Shader) -> Option<Result<String, String>> {
    let directory = PathBuf::from(std::env::var_os(SHADER_DIR_VARIABLE)?);
    let path = directory.join(format!("{}.wgsl", shader.name));
    path.exists().then(|| std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display())))
}

fn bind_group_layout(device: &wgpu::Device, variant: &Variant) -> wgpu::BindGroupLayout {
    let buffer = |ty, has_dynamic_offset| wgpu::BindingType::Buffer { ty, has_dynamic_offset, min_binding_size: None };
    let entry = |index: usize| wgpu::BindGroupLayoutEntry {
        binding: index as u32,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: match variant.binding(index) {
            Binding::Read => buffer(wgpu::BufferBindingType::Storage { read_only: true }, false),
            Binding::ReadWrite => buffer(wgpu::BufferBindingType::Storage { read_only: false }, false),
            Binding::Params => buffer(wgpu::BufferBindingType::Uniform, true),
            Binding::Weights(words) => wgpu::BindingType::StorageTexture {
                access: wgpu::StorageTextureAccess::ReadOnly,
                format: texel_format(words),
                view_dimension: wgpu::TextureViewDimension::D2,
            },
        },
        count: None,
    };
    let entries: Vec<_> = (0..variant.shader.bindings.len()).map(entry).collect();
    let descriptor = wgpu::BindGroupLayoutDescriptor { label: Some(variant.shader.name), entries: &entries };
    device.create_bind_group_layout(&descriptor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_cut_or_changed_is_none() {
        let path = std::env::temp_dir().join(format!("pagoda-pipelines-{}", std::process::id()));
        let data = b"what a driver gave".to_vec();
        let checksum = *blake3::hash(&data).as_bytes();
        write(&path, &checksum, &data).unwrap();
        assert_eq!(read(&path), Some(data));
        let whole = std::fs::read(&path).unwrap();
        for broken in [&whole[..whole.len() - 1], &whole[..40], &whole[..3], &[], &[&whole[..], &[0]].concat()] {
            std::fs::write(&path, broken).unwrap();
            assert_eq!(read(&path), None, "{} bytes", broken.len());
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read(&path), None);
    }
}
