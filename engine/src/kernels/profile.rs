//! How long each kernel takes on the device: a pair of timestamps around every dispatch while a profile is taken.
//!
//! Used by the encoder for `pagoda bench engine`; off, it costs nothing. A profiled dispatch has a pass of its own, so the whole
//! is somewhat slower than without.

use std::collections::BTreeMap;

use burn::tensor::wgpu::wgpu;

use super::gpu::Gpu;
use crate::ops::DeviceError;

/// What one kernel's dispatches took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KernelTime {
    /// Dispatches.
    pub count: u64,
    /// Seconds of all of them.
    pub seconds: f64,
    /// What they were estimated at: multiply-adds, or values where a kernel multiplies nothing.
    pub work: u64,
}

/// By kernel and its weights' format.
pub type KernelTimes = BTreeMap<String, KernelTime>;

/// Dispatches of one submit that are timed; wgpu bounds a set of queries.
pub(super) const MAX_TIMED: usize = 2048;

/// A profile that is being taken.
pub(super) struct Profile {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    staging: wgpu::Buffer,
    nanoseconds: f64,
    /// Of the submit at hand: the kernel's name and work by pair of queries.
    recorded: Vec<(String, u64)>,
    times: KernelTimes,
}

impl Profile {
    /// A profile; `None` where the device has no timestamps.
    pub(super) fn start(gpu: &Gpu) -> Option<Self> {
        if !gpu.device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            return None;
        }
        let count = 2 * MAX_TIMED as u32;
        let queries = gpu.device.create_query_set(&wgpu::QuerySetDescriptor {
            label: Some("profile"),
            ty: wgpu::QueryType::Timestamp,
            count,
        });
        let buffer = |usage| {
            let size = u64::from(count) * 8;
            let label = Some("profile");
            gpu.device.create_buffer(&wgpu::BufferDescriptor { label, size, usage, mapped_at_creation: false })
        };
        Some(Self {
            queries,
            resolved: buffer(wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC),
            staging: buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST),
            nanoseconds: f64::from(gpu.queue.get_timestamp_period()),
            recorded: Vec::new(),
            times: KernelTimes::new(),
        })
    }

    /// The queries around the next dispatch. The encoder submits before there are more than [`MAX_TIMED`].
    pub(super) fn around(&mut self, kernel: &str, work: u64) -> wgpu::ComputePassTimestampWrites<'_> {
        let first = 2 * self.recorded.len() as u32;
        self.recorded.push((kernel.to_owned(), work));
        wgpu::ComputePassTimestampWrites {
            query_set: &self.queries,
            beginning_of_pass_write_index: Some(first),
            end_of_pass_write_index: Some(first + 1),
        }
    }

    /// Ends a submit's commands: its timestamps go where they can be read.
    pub(super) fn resolve(&self, encoder: &mut wgpu::CommandEncoder) {
        let count = 2 * self.recorded.len() as u32;
        if count > 0 {
            encoder.resolve_query_set(&self.queries, 0..count, &self.resolved, 0);
            encoder.copy_buffer_to_buffer(&self.resolved, 0, &self.staging, 0, u64::from(count) * 8);
        }
    }

    /// Waits for a submit and adds its times up.
    ///
    /// # Errors
    /// When the device has failed.
    pub(super) fn collect(&mut self, gpu: &Gpu) -> Result<(), DeviceError> {
        let lost = |error: String| DeviceError::Lost(error);
        let bytes = self.recorded.len() as u64 * 16;
        if bytes == 0 {
            return Ok(());
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        self.staging.slice(..bytes).map_async(wgpu::MapMode::Read, move |result| drop(sender.send(result)));
        gpu.wait()?;
        receiver.recv().map_err(|error| lost(error.to_string()))?.map_err(|error| lost(error.to_string()))?;
        {
            let view = self.staging.slice(..bytes).get_mapped_range().map_err(|error| lost(error.to_string()))?;
            let stamps: &[[u64; 2]] = bytemuck::cast_slice(&view);
            for ((kernel, work), [begun, ended]) in self.recorded.drain(..).zip(stamps) {
                let time = self.times.entry(kernel).or_default();
                time.count += 1;
                time.seconds += ended.saturating_sub(*begun) as f64 * self.nanoseconds * 1e-9;
                time.work += work;
            }
        }
        self.staging.unmap();
        Ok(())
    }

    /// The times so far.
    pub(super) fn finish(self) -> KernelTimes {
        self.times
    }
}
