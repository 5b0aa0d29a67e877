//! Storage images that hold weights: Mesa's software adapters load texels of all lanes at once, words of a buffer lane by lane.
//!
//! Made by the upload of weights where the plan says so, bound by the encoder as buffers are. A texel is one word or four;
//! texels follow each other in rows of [`IMAGE_WIDTH`], which `weights.wgsl` has too.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::cubecl::future::block_on;
use burn::tensor::wgpu::wgpu;

use super::gpu::{Gpu, GpuBuffer};
use crate::ops::DeviceError;

/// Texels a row.
pub const IMAGE_WIDTH: u32 = 1024;

/// What a kernel can bind.
pub trait Bindable {
    /// Distinguishes resources in bind group keys; never reused.
    fn id(&self) -> u64;
    /// For a bind group.
    fn resource(&self) -> wgpu::BindingResource<'_>;
}

impl Bindable for GpuBuffer {
    fn id(&self) -> u64 {
        self.id
    }

    fn resource(&self) -> wgpu::BindingResource<'_> {
        let (buffer, offset) = self.raw();
        wgpu::BindingResource::Buffer(wgpu::BufferBinding {
            buffer,
            offset,
            size: std::num::NonZeroU64::new(self.size),
        })
    }
}

/// A storage image on the device. Freed when dropped.
pub struct GpuImage {
    id: u64,
    /// Words a texel.
    words: u32,
    texture: wgpu::Texture,
    view: wgpu::TextureView,
    allocated: Arc<AtomicU64>,
}

impl Drop for GpuImage {
    fn drop(&mut self) {
        self.allocated.fetch_sub(self.bytes(), Ordering::Relaxed);
    }
}

impl GpuImage {
    /// Bytes, whole rows.
    fn bytes(&self) -> u64 {
        4 * u64::from(self.words) * u64::from(IMAGE_WIDTH) * u64::from(self.texture.height())
    }
}

impl Bindable for GpuImage {
    fn id(&self) -> u64 {
        self.id
    }

    fn resource(&self) -> wgpu::BindingResource<'_> {
        wgpu::BindingResource::TextureView(&self.view)
    }
}

impl Gpu {
    /// An image of `texels` of `words` words, 4 or 1.
    ///
    /// # Errors
    /// When it has more rows than the device allows, or there is no memory for it.
    pub fn allocate_image(&self, what: &str, texels: u64, words: u32) -> Result<GpuImage, DeviceError> {
        let rows = texels.div_ceil(u64::from(IMAGE_WIDTH)).max(1);
        let bytes = 4 * u64::from(words) * u64::from(IMAGE_WIDTH) * rows;
        let refuse = |reason: String| DeviceError::OutOfMemory { what: what.to_owned(), bytes, reason };
        let limit = self.device.limits().max_texture_dimension_2d;
        let height = u32::try_from(rows).ok().filter(|&rows| rows <= limit && IMAGE_WIDTH <= limit);
        let height = height.ok_or_else(|| refuse(format!("an image of {rows} rows, the limit is {limit}")))?;
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let texture = self.device.create_texture(&wgpu::TextureDescriptor {
            label: Some(what),
            size: wgpu::Extent3d { width: IMAGE_WIDTH, height, depth_or_array_layers: 1 },
            mip_level_count: 1,
            sample_count: 1,
            dimension: wgpu::TextureDimension::D2,
            format: texel_format(words),
            usage: wgpu::TextureUsages::STORAGE_BINDING | wgpu::TextureUsages::COPY_DST,
            view_formats: &[],
        });
        if let Some(error) = block_on(scope.pop()) {
            return Err(refuse(error.to_string()));
        }
        self.check()?;
        let view = texture.create_view(&wgpu::TextureViewDescriptor::default());
        let image = GpuImage { id: self.fresh_id(), words, texture, view, allocated: self.allocation_count() };
        image.allocated.fetch_add(image.bytes(), Ordering::Relaxed);
        Ok(image)
    }

    /// Queues a write of whole texels from texel `first` on.
    pub fn write_image(&self, image: &GpuImage, first: u64, data: &[u8]) {
        let (texel_bytes, width) = (4 * image.words as usize, IMAGE_WIDTH as usize);
        assert!(
            data.len().is_multiple_of(texel_bytes) && first * texel_bytes as u64 + data.len() as u64 <= image.bytes()
        );
        let (mut at, mut rest) = (first as usize, data);
        while !rest.is_empty() {
            let (x, left) = (at % width, rest.len() / texel_bytes);
            // The rest of a row that is begun, or all whole rows, or what is left for the last.
            let texels = if x > 0 || left < width { left.min(width - x) } else { left / width * width };
            let (now, later) = rest.split_at(texels * texel_bytes);
            let origin = wgpu::Origin3d { x: x as u32, y: (at / width) as u32, z: 0 };
            let to = wgpu::TexelCopyTextureInfo {
                texture: &image.texture,
                mip_level: 0,
                origin,
                aspect: wgpu::TextureAspect::All,
            };
            let height = texels.div_ceil(width) as u32;
            let layout = wgpu::TexelCopyBufferLayout {
                offset: 0,
                bytes_per_row: Some((texels.min(width) * texel_bytes) as u32),
                rows_per_image: Some(height),
            };
            let extent = wgpu::Extent3d { width: texels.min(width) as u32, height, depth_or_array_layers: 1 };
            self.queue.write_texture(to, now, layout, extent);
            (at, rest) = (at + texels, later);
        }
    }
}

/// The format of texels of so many words.
pub(super) fn texel_format(words: u32) -> wgpu::TextureFormat {
    if words == 1 { wgpu::TextureFormat::R32Uint } else { wgpu::TextureFormat::Rgba32Uint }
}

/// Words of weights on the device: in a buffer or an image.
pub enum Words {
    /// A storage buffer.
    Buffer(GpuBuffer),
    /// A storage image.
    Image(GpuImage),
}

impl Words {
    /// Room for `texels` of `words` words, 4 or 1.
    ///
    /// # Errors
    /// As [`Gpu::allocate`] and [`Gpu::allocate_image`].
    pub fn allocate(gpu: &Gpu, what: &str, texels: u64, words: u32, in_image: bool) -> Result<Self, DeviceError> {
        if in_image {
            return gpu.allocate_image(what, texels, words).map(Self::Image);
        }
        gpu.allocate(what, 4 * u64::from(words) * texels).map(Self::Buffer)
    }

    /// Queues a write of whole texels, of `words` words each, from texel `first` on.
    pub fn write(&self, gpu: &Gpu, first: u64, words: u32, data: &[u8]) {
        match self {
            Self::Buffer(buffer) => gpu.write(buffer, 4 * u64::from(words) * first, data),
            Self::Image(image) => gpu.write_image(image, first, data),
        }
    }
}

impl Bindable for Words {
    fn id(&self) -> u64 {
        match self {
            Self::Buffer(buffer) => buffer.id(),
            Self::Image(image) => image.id(),
        }
    }

    fn resource(&self) -> wgpu::BindingResource<'_> {
        match self {
            Self::Buffer(buffer) => buffer.resource(),
            Self::Image(image) => image.resource(),
        }
    }
}
