//! A GPU with its memory: burn owns the allocations, our encoder binds their raw buffers.
//!
//! Created once by the engine thread, which alone loads and steps (cubecl's streams are per thread). Invariant: every
//! buffer is alone in its `wgpu::Buffer` (burn's persistent pool), so that it can be bound read-only beside written ones.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use burn::backend::DispatchDevice;
use burn::backend::wgpu::AutoCompiler;
use burn::cubecl::client::Client;
use burn::cubecl::wgpu::WgpuServer;
use burn::tensor::Device;
use burn::tensor::wgpu::wgpu;

use crate::device::OpenDevice;
use crate::ops::DeviceError;

/// The opened device, shared by everything that allocates or records on it.
pub struct Gpu {
    /// What was opened.
    pub info: crate::device::DeviceInfo,
    /// The wgpu device.
    pub device: wgpu::Device,
    /// Its queue.
    pub queue: wgpu::Queue,
    client: Client,
    next_id: AtomicU64,
    /// Bytes of all buffers and images that are alive.
    allocated: Arc<AtomicU64>,
    /// First error that no scope caught: from then on the device is failed.
    failure: Arc<OnceLock<DeviceError>>,
}

/// A device buffer. Freed when dropped.
pub struct GpuBuffer {
    /// Distinguishes buffers in bind group keys; never reused.
    pub id: u64,
    /// Bytes, a multiple of 16.
    pub size: u64,
    buffer: wgpu::Buffer,
    offset: u64,
    /// burn's hold on the allocation, whose type it does not export: while held, the memory is not freed, handed out
    /// again or moved.
    _allocation: Box<dyn Any + Send>,
    allocated: Arc<AtomicU64>,
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        self.allocated.fetch_sub(self.size, Ordering::Relaxed);
    }
}

impl GpuBuffer {
    /// The raw buffer and where the allocation starts in it.
    pub fn raw(&self) -> (&wgpu::Buffer, u64) {
        (&self.buffer, self.offset)
    }
}

impl Gpu {
    /// Registers the opened device with burn.
    ///
    /// # Errors
    /// When burn refuses it.
    pub fn new(open: OpenDevice) -> Result<Self, DeviceError> {
        let OpenDevice { info, setup } = open;
        let (device, queue) = (setup.device.clone(), setup.queue.clone());
        let refused = |reason: String| DeviceError::Refused { what: "burn's registration".into(), reason };
        let burn_device: Device =
            Device::wgpu_options().setup(setup).init().map_err(|error| refused(error.to_string()))?;
        let client = match burn_device.as_dispatch() {
            DispatchDevice::Cube(cube) => cube.client(),
            _ => return Err(refused("not a cubecl device".into())),
        };
        let failure = Arc::new(OnceLock::new());
        let gpu = Self { info, device, queue, client, next_id: AtomicU64::new(0), allocated: Arc::default(), failure };
        gpu.watch();
        Ok(gpu)
    }

    /// Remembers the first failure, whoever causes it: wgpu reports most errors here and not to the caller.
    fn watch(&self) {
        let failure = Arc::clone(&self.failure);
        self.device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            let what = "an operation".to_owned();
            let found = match error {
                wgpu::Error::OutOfMemory { source } => {
                    DeviceError::OutOfMemory { what, bytes: 0, reason: source.to_string() }
                }
                wgpu::Error::Validation { description, .. } | wgpu::Error::Internal { description, .. } => {
                    DeviceError::Refused { what, reason: description }
                }
            };
            tracing::error!(error = %found, "device error");
            // A second error adds nothing: the device is failed already.
            drop(failure.set(found));
        }));
        let failure = Arc::clone(&self.failure);
        self.device.set_device_lost_callback(move |reason, message| {
            drop(failure.set(DeviceError::Lost(format!("{reason:?} {message}"))));
        });
    }

    /// The failure so far, as an error.
    ///
    /// # Errors
    /// When the device has failed at any time before.
    pub fn check(&self) -> Result<(), DeviceError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    /// Destroys the device, as a driver does that gives up: for tests of what follows.
    pub fn lose(&self) {
        self.device.destroy();
    }

    /// A number for a new resource.
    pub(super) fn fresh_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// The count that a new resource adds its bytes to.
    pub(super) fn allocation_count(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.allocated)
    }

    /// Bytes of all buffers and images that are alive.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// Largest part of a buffer that one binding can cover, bytes.
    pub fn max_binding_bytes(&self) -> u64 {
        let limits = self.device.limits();
        limits.max_storage_buffer_binding_size.min(limits.max_buffer_size)
    }

    /// The size for a buffer that has to grow to `bytes`: some more, within the binding limit.
    pub fn grown(&self, bytes: u64) -> u64 {
        bytes.next_power_of_two().min(self.max_binding_bytes() / 16 * 16).max(bytes)
    }

    /// A buffer of `bytes` (rounded up to 16), its contents zero or garbage.
    ///
    /// # Errors
    /// When it is over the binding limit or the device has no memory for it.
    pub fn allocate(&self, what: &str, bytes: u64) -> Result<GpuBuffer, DeviceError> {
        let size = bytes.next_multiple_of(16).max(16);
        let refuse = |reason: String| DeviceError::OutOfMemory { what: what.to_owned(), bytes: size, reason };
        if size > self.max_binding_bytes() {
            return Err(refuse(format!("its limit for one binding is {} bytes", self.max_binding_bytes())));
        }
        let client = self.client.clone();
        let handle = self.client.memory_persistent_allocation((), move |()| client.empty(size as usize));
        let resource =
            self.client.get_resource::<WgpuServer<AutoCompiler>>(handle).map_err(|error| refuse(error.to_string()))?;
        self.check()?;
        let id = self.fresh_id();
        let (buffer, offset) = (resource.resource().buffer.clone(), resource.resource().offset);
        self.allocated.fetch_add(size, Ordering::Relaxed);
        let allocated = self.allocation_count();
        Ok(GpuBuffer { id, size, buffer, offset, _allocation: Box::new(resource), allocated })
    }

    /// A buffer holding `data`.
    ///
    /// # Errors
    /// As [`Self::allocate`].
    pub fn upload(&self, what: &str, data: &[u8]) -> Result<GpuBuffer, DeviceError> {
        let buffer = self.allocate(what, data.len() as u64)?;
        self.write(&buffer, 0, data);
        // The copy is submitted at once, so that no more than one tensor waits in staging memory.
        self.queue.submit([]);
        self.wait()?;
        Ok(buffer)
    }

    /// Queues a write of `data` at byte `offset`; it lands before the next submit's commands.
    pub fn write(&self, buffer: &GpuBuffer, offset: u64, data: &[u8]) {
        let (raw, base) = buffer.raw();
        assert!(offset + data.len() as u64 <= buffer.size, "write past the end of a buffer of {} bytes", buffer.size);
        let padded;
        let data = if data.len().is_multiple_of(4) {
            data
        } else {
            padded = [data, &[0, 0, 0][..data.len().next_multiple_of(4) - data.len()]].concat();
            &padded
        };
        self.queue.write_buffer(raw, base + offset, data);
    }

    /// Waits for all submitted work.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn wait(&self) -> Result<(), DeviceError> {
        self.device.poll(wgpu::PollType::wait_indefinitely()).map_err(|error| DeviceError::Lost(error.to_string()))?;
        self.check()
    }

    /// Reads the first `bytes` of each buffer back in one submit.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn read(&self, wanted: &[(&GpuBuffer, u64)]) -> Result<Vec<Vec<u8>>, DeviceError> {
        let total: u64 = wanted.iter().map(|(_, bytes)| bytes.next_multiple_of(16)).sum();
        let staging = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("readback"),
            size: total.max(16),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder =
            self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("readback") });
        let mut offset = 0;
        for (buffer, bytes) in wanted {
            let (raw, base) = buffer.raw();
            encoder.copy_buffer_to_buffer(raw, base, &staging, offset, bytes.next_multiple_of(4));
            offset += bytes.next_multiple_of(16);
        }
        self.queue.submit([encoder.finish()]);
        let (sender, receiver) = std::sync::mpsc::channel();
        staging.slice(..).map_async(wgpu::MapMode::Read, move |result| {
            // The receiver lives until this function returns, and the callback runs within `wait`.
            drop(sender.send(result));
        });
        self.wait()?;
        receiver
            .recv()
            .map_err(|_| DeviceError::Lost("the readback was dropped".into()))?
            .map_err(|error| DeviceError::Lost(error.to_string()))?;
        let view = staging.slice(..).get_mapped_range().map_err(|error| DeviceError::Lost(error.to_string()))?;
        let mut offset = 0;
        let mut all = Vec::with_capacity(wanted.len());
        for (_, bytes) in wanted {
            all.push(view[offset as usize..][..*bytes as usize].to_vec());
            offset += bytes.next_multiple_of(16);
        }
        Ok(all)
    }
}
