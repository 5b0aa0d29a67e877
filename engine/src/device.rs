//! Devices: what there is, what `auto` takes, and opening one.
//!
//! Called by the binary (`pagoda devices`) and by the engine at start. GPU devices are named by backend and index
//! (`vulkan:0`), the CPU is `cpu`. Software adapters (lavapipe, SwiftShader, WARP) are taken only when named.

use burn::cubecl::future::block_on;
use burn::tensor::wgpu::wgpu;
use wgpu::{Backends, DeviceType, Features};

use crate::error::LoadError;
use crate::kernels::{IMAGE_WIDTH, SPLIT};
use crate::kv::KvLayout;
use crate::ops::wgpu as wgpu_ops;

/// The name of the CPU device.
pub const CPU: &str = "cpu";
/// The name that lets us choose.
pub const AUTO: &str = "auto";

const BACKENDS: [(Backends, &str); 4] =
    [(Backends::METAL, "metal"), (Backends::VULKAN, "vulkan"), (Backends::DX12, "dx12"), (Backends::GL, "gl")];

/// Features that change which kernels run or what can be measured.
const NOTABLE_FEATURES: [(Features, &str); 6] = [
    (Features::SHADER_F16, "f16"),
    (Features::SUBGROUP, "subgroups"),
    (Features::IMMEDIATES, "immediates"),
    (Features::PIPELINE_CACHE, "pipeline-cache"),
    (Features::TIMESTAMP_QUERY, "timestamps"),
    (Features::EXPERIMENTAL_COOPERATIVE_MATRIX, "cooperative-matrix"),
];

/// What the variants of kernels are chosen by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traits {
    /// Whether kernels run on the CPU all the same.
    pub software: bool,
    /// Whether it has subgroups.
    pub subgroups: bool,
    /// Lanes of a subgroup, where it has subgroups and all are of one size.
    pub subgroup_size: Option<u32>,
    /// Rows of the tallest image of words that kernels can read; `None` where they cannot.
    pub image_rows: Option<u32>,
    /// Whether it computes in half precision.
    pub f16: bool,
    /// Side of the matrices of f16 that it multiplies into f32.
    pub matrix_size: Option<u32>,
}

impl Traits {
    /// Whether our kernels can use its matrix units: they count on subgroups of 32.
    pub fn has_matrices(&self) -> bool {
        self.f16 && self.matrix_size.is_some() && self.subgroup_size == Some(32)
    }
}

/// One adapter, or the CPU.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// What `--device` takes.
    pub name: String,
    /// The adapter's own name.
    pub adapter: String,
    /// Driver and its version.
    pub driver: String,
    /// `discrete`, `integrated`, `virtual`, `software` or `other`.
    pub kind: &'static str,
    /// What kernels are chosen by.
    pub traits: Traits,
    /// Largest buffer, bytes; `None` for the CPU.
    pub max_buffer_bytes: Option<u64>,
    /// Largest part of a buffer that a kernel can bind, bytes; `None` for the CPU.
    pub max_binding_bytes: Option<u64>,
    /// Memory of its largest heap of its own, bytes; `None` where the backend does not tell.
    pub memory_bytes: Option<u64>,
    /// Notable features that it has.
    pub features: Vec<&'static str>,
}

/// What the sizes of a model's buffers are chosen from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The device's memory, or the system's where it is shared; `None` is not known.
    pub total_bytes: Option<u64>,
    /// Whether it is a hardware GPU's own, so that taking most of it is what people expect.
    pub is_own: bool,
    /// Where the total is not known: what could be allocated when it was tried.
    pub probed_bytes: Option<u64>,
    /// Largest part of a buffer that a kernel can bind; `None` is no bound.
    pub max_binding_bytes: Option<u64>,
    /// What the weights take of it.
    pub weights_bytes: u64,
}

/// An adapter that is not opened yet.
struct Found {
    info: DeviceInfo,
    adapter: wgpu::Adapter,
}

/// A GPU opened by its name: the handles that burn and our encoder share.
#[derive(Clone, Debug)]
pub struct OpenDevice {
    /// What was opened.
    pub info: DeviceInfo,
    /// The wgpu handles.
    pub setup: burn::tensor::wgpu::WgpuSetup,
}

/// What a device name stands for.
#[derive(Clone, Debug)]
pub enum Selected {
    /// The CPU ops.
    Cpu,
    /// An opened adapter.
    Gpu(Box<OpenDevice>),
}

impl Selected {
    /// Tokens of contexts that one step's decodes may read in all: their attention's partial results lie in one buffer.
    pub fn max_context_tokens(&self, layout: &KvLayout, max_num_seqs: usize) -> usize {
        const MAX_PARTIALS: u64 = 256 << 20;
        match self {
            Self::Cpu => usize::MAX,
            Self::Gpu(open) => {
                let bytes = open.info.max_binding_bytes.unwrap_or(u64::MAX).min(MAX_PARTIALS);
                let splits = usize::try_from(bytes / wgpu_ops::partial_bytes(layout)).unwrap_or(usize::MAX);
                // Each sequence's last split may be nearly empty. The buffer covers the pool in any case.
                let tokens = splits.saturating_sub(max_num_seqs).saturating_mul(SPLIT as usize);
                tokens.max(layout.num_blocks * layout.block_size)
            }
        }
    }

    /// What a model of `weights_bytes` finds here. Where the device does not tell, up to `wanted` bytes are tried, if any.
    pub fn memory(&self, weights_bytes: u64, wanted: Option<u64>) -> DeviceMemory {
        match self {
            Self::Cpu => DeviceMemory { total_bytes: system_memory_bytes(), weights_bytes, ..DeviceMemory::default() },
            Self::Gpu(open) => {
                let info = &open.info;
                let is_own = !info.traits.software && info.kind == "discrete";
                let max_binding_bytes = info.max_binding_bytes.min(info.max_buffer_bytes);
                let probed_bytes = wanted.filter(|_| info.memory_bytes.is_none()).map(|wanted| open.probe(wanted));
                let total_bytes = info.memory_bytes;
                DeviceMemory { total_bytes, is_own, probed_bytes, max_binding_bytes, weights_bytes }
            }
        }
    }
}

/// Buffers of a probe.
const PROBE_BYTES: u64 = 128 << 20;

impl OpenDevice {
    /// Allocates up to `wanted` bytes, buffer by buffer, and gives them back: how many there were.
    pub fn probe(&self, wanted: u64) -> u64 {
        let device = &self.setup.device;
        let limits = device.limits();
        let size = PROBE_BYTES.min(limits.max_buffer_size).max(1);
        let mut buffers = Vec::new();
        while (buffers.len() as u64) * size < wanted {
            let scope = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
            let buffer = device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("probe"),
                size,
                usage: wgpu::BufferUsages::STORAGE,
                mapped_at_creation: false,
            });
            if block_on(scope.pop()).is_some() {
                break;
            }
            buffers.push(buffer);
        }
        let probed = buffers.len() as u64 * size;
        buffers.iter().for_each(wgpu::Buffer::destroy);
        drop(buffers);
        // What waits for its release is released before anything else is allocated.
        drop(device.poll(wgpu::PollType::wait_indefinitely()));
        probed
    }
}

/// All devices, the CPU last, and the name that `auto` takes.
pub fn list() -> (Vec<DeviceInfo>, String) {
    let found = adapters(&instance(Backends::all()));
    let auto = strongest(&found).map_or_else(|| CPU.to_owned(), |found| found.info.name.clone());
    let mut infos: Vec<DeviceInfo> = found.into_iter().map(|found| found.info).collect();
    infos.push(cpu_info());
    (infos, auto)
}

/// Opens the device called `name`; `auto` is the strongest hardware adapter, else the CPU.
///
/// # Errors
/// When there is no such device (the error lists those that exist), or it cannot be opened.
pub fn select(name: &str) -> Result<Selected, LoadError> {
    if name == CPU {
        return Ok(Selected::Cpu);
    }
    let instance = instance(backends_of(name));
    let found = adapters(&instance);
    let chosen = if name == AUTO {
        match strongest(&found) {
            Some(found) => found,
            None => return Ok(Selected::Cpu),
        }
    } else {
        found.iter().find(|found| found.info.name == name).ok_or_else(|| no_device(name, "does not exist".into()))?
    };
    let setup = open(&instance, &chosen.adapter).map_err(|reason| no_device(name, reason))?;
    Ok(Selected::Gpu(Box::new(OpenDevice { info: chosen.info.clone(), setup })))
}

/// The first software adapter's name on Vulkan, for tests and benches.
pub fn software_vulkan() -> Option<String> {
    let found = adapters(&instance(Backends::VULKAN));
    found.into_iter().find(|found| found.info.traits.software).map(|found| found.info.name)
}

fn no_device(name: &str, reason: String) -> LoadError {
    let (infos, _) = list();
    let names: Vec<String> = infos.iter().map(|info| format!("{} ({})", info.name, info.adapter)).collect();
    LoadError::NoDevice { name: name.to_owned(), reason, available: names.join(", ") }
}

/// The backends that a name can mean: a driver that is not asked for is not loaded.
fn backends_of(name: &str) -> Backends {
    let named = BACKENDS.iter().find(|(_, prefix)| name.split(':').next() == Some(*prefix));
    named.map_or(Backends::VULKAN | Backends::METAL | Backends::DX12, |(backends, _)| *backends)
}

fn instance(backends: Backends) -> wgpu::Instance {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = backends;
    // wgpu's validation of each call stays; the driver's debug layers, which it would switch on in a debug build, do not.
    descriptor.flags = wgpu::InstanceFlags::empty();
    wgpu::Instance::new(descriptor)
}

fn adapters(instance: &wgpu::Instance) -> Vec<Found> {
    let mut all = Vec::new();
    for (backends, prefix) in BACKENDS {
        let adapters = block_on(instance.enumerate_adapters(backends));
        for (index, adapter) in adapters.into_iter().enumerate() {
            let info = describe(&adapter, format!("{prefix}:{index}"));
            all.push(Found { info, adapter });
        }
    }
    all
}

fn describe(adapter: &wgpu::Adapter, name: String) -> DeviceInfo {
    let info = adapter.get_info();
    let limits = adapter.limits();
    let features = adapter.features();
    let kind = match info.device_type {
        DeviceType::DiscreteGpu => "discrete",
        DeviceType::IntegratedGpu => "integrated",
        DeviceType::VirtualGpu => "virtual",
        DeviceType::Cpu => "software",
        DeviceType::Other => "other",
    };
    DeviceInfo {
        name,
        driver: [info.driver, info.driver_info].join(" ").trim().to_owned(),
        kind,
        traits: Traits {
            software: info.device_type == DeviceType::Cpu,
            subgroup_size: match info.backend {
                // Apple's are all of 32, whatever bounds Metal tells; those of other makers have no matrices there.
                wgpu::Backend::Metal if features.contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX) => Some(32),
                _ => (features.contains(Features::SUBGROUP) && info.subgroup_min_size == info.subgroup_max_size)
                    .then_some(info.subgroup_min_size),
            },
            image_rows: image_rows(adapter),
            subgroups: features.contains(Features::SUBGROUP),
            f16: features.contains(Features::SHADER_F16),
            matrix_size: matrix_size(adapter),
        },
        adapter: info.name,
        max_buffer_bytes: Some(limits.max_buffer_size),
        max_binding_bytes: Some(limits.max_storage_buffer_binding_size),
        memory_bytes: heap_bytes(adapter),
        features: NOTABLE_FEATURES.iter().filter(|(bit, _)| features.contains(*bit)).map(|(_, name)| *name).collect(),
    }
}

/// Side of the largest square matrices of f16 that the adapter multiplies into f32, of those that kernels have.
fn matrix_size(adapter: &wgpu::Adapter) -> Option<u32> {
    use wgpu::CooperativeScalarType::{F16, F32};
    if !adapter.features().contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
        return None;
    }
    let offered = adapter.cooperative_matrix_properties();
    [16, 8].into_iter().find(|&side| {
        offered.iter().any(|matrix| {
            [matrix.m_size, matrix.n_size, matrix.k_size] == [side; 3] && matrix.ab_type == F16 && matrix.cr_type == F32
        })
    })
}

/// Where kernels can read images of one word and of four words a texel.
fn image_rows(adapter: &wgpu::Adapter) -> Option<u32> {
    let readable = |format| {
        let flags = adapter.get_texture_format_features(format).flags;
        flags.contains(wgpu::TextureFormatFeatureFlags::STORAGE_READ_ONLY)
    };
    let rows = adapter.limits().max_texture_dimension_2d;
    let all = readable(wgpu::TextureFormat::R32Uint) && readable(wgpu::TextureFormat::Rgba32Uint);
    (all && rows >= IMAGE_WIDTH).then_some(rows)
}

/// The largest heap of the device's own memory, where its backend tells: Vulkan does.
#[cfg(any(target_os = "linux", target_os = "windows", target_os = "android"))]
fn heap_bytes(adapter: &wgpu::Adapter) -> Option<u64> {
    /// `VK_MEMORY_HEAP_DEVICE_LOCAL_BIT`.
    const DEVICE_LOCAL: u32 = 1;
    // SAFETY: the handles are the adapter's own, alive while it is borrowed, and are only read; nothing is destroyed.
    let properties = unsafe {
        let vulkan = adapter.as_hal::<wgpu::hal::api::Vulkan>()?;
        let instance = vulkan.shared_instance().raw_instance();
        instance.get_physical_device_memory_properties(vulkan.raw_physical_device())
    };
    let heaps = properties.memory_heaps.iter().take(properties.memory_heap_count as usize);
    heaps.filter(|heap| heap.flags.as_raw() & DEVICE_LOCAL != 0).map(|heap| heap.size).max()
}

#[cfg(not(any(target_os = "linux", target_os = "windows", target_os = "android")))]
fn heap_bytes(_adapter: &wgpu::Adapter) -> Option<u64> {
    None
}

/// The system's memory that is free, where the system tells by `/proc/meminfo`.
fn system_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

fn cpu_info() -> DeviceInfo {
    DeviceInfo {
        name: CPU.to_owned(),
        adapter: format!("{} threads", rayon::current_num_threads()),
        driver: String::new(),
        kind: "cpu",
        traits: Traits::default(),
        max_buffer_bytes: None,
        max_binding_bytes: None,
        memory_bytes: system_memory_bytes(),
        features: Vec::new(),
    }
}

/// Discrete before integrated before the rest; at equal rank the first listed. Never GL: a GPU that has nothing better is
/// older than our kernels, and is taken when named.
fn strongest(found: &[Found]) -> Option<&Found> {
    let rank = |found: &Found| match found.info.kind {
        "discrete" => 3,
        "integrated" => 2,
        _ => 1,
    };
    // `max_by_key` keeps the last of equals, so the list is walked from its end.
    let eligible = |found: &&Found| {
        !found.info.traits.software && found.info.kind != "other" && !found.info.name.starts_with("gl:")
    };
    found.iter().rev().filter(eligible).max_by_key(|found| rank(found))
}

fn open(instance: &wgpu::Instance, adapter: &wgpu::Adapter) -> Result<burn::tensor::wgpu::WgpuSetup, String> {
    // cubecl reads features from the adapter, so the device must have what cubecl's own request would ask for.
    let descriptor = wgpu::DeviceDescriptor {
        label: Some("pagoda"),
        required_features: adapter.features() - Features::MAPPABLE_PRIMARY_BUFFERS,
        required_limits: adapter.limits(),
        // SAFETY: experimental features are requested because burn asks for the same set. Of them our kernels use cooperative
        // matrices, of the sizes that the adapter lists, and only after a trial against plain arithmetic.
        experimental_features: unsafe { wgpu::ExperimentalFeatures::enabled() },
        memory_hints: wgpu::MemoryHints::MemoryUsage,
        trace: wgpu::Trace::Off,
    };
    let (device, queue) = block_on(adapter.request_device(&descriptor)).map_err(|error| error.to_string())?;
    Ok(burn::tensor::wgpu::WgpuSetup {
        instance: instance.clone(),
        adapter: adapter.clone(),
        device,
        queue,
        backend: adapter.get_info().backend,
    })
}
