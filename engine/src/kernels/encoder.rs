//! The only file that records dispatches: bind groups, parameters and submits.
//!
//! Wrappers call [`Encoder::dispatch`]; the ops call [`Encoder::submit`] at the end of a step. Bind groups are
//! made once per (kernel, buffers). Parameters go into one uniform buffer, bound at a dynamic offset and
//! written once a submit. A submit is cut when its estimated work passes the plan's bound, so that a driver's watchdog
//! does not take a long prefill for a hang.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::wgpu::wgpu;
use bytemuck::Pod;
use shaders::Variant;

use super::gpu::{Gpu, GpuBuffer};
use super::image::Bindable;
use super::pipelines::{Kernel, Pipelines};
use super::profile::{KernelTimes, MAX_TIMED, Profile};
use crate::ops::DeviceError;

/// What a submit does, in order.
enum Recorded {
    Dispatch(Dispatch),
    Copy(Copy),
}

struct Dispatch {
    /// Of the kernel, while a profile is taken.
    title: Option<String>,
    work: u64,
    pipeline: wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
    params_offset: u32,
    grid: [u32; 3],
}

struct Copy {
    from: (wgpu::Buffer, u64),
    to: (wgpu::Buffer, u64),
    bytes: u64,
}

/// Dispatches whose parameters fit the uniform buffer; more than that are cut into a second submit.
const MAX_DISPATCHES: u64 = 4096;

/// Records and submits the work of a step.
pub struct Encoder {
    gpu: Arc<Gpu>,
    pipelines: Pipelines,
    bind_groups: HashMap<(usize, Vec<u64>), wgpu::BindGroup>,
    stubs: Option<[Arc<GpuBuffer>; 2]>,
    profile: Option<Profile>,
    params: wgpu::Buffer,
    params_stride: u64,
    params_bytes: Vec<u8>,
    recorded: Vec<Recorded>,
    num_dispatches: u64,
    work: u64,
    max_work: u64,
}

impl Encoder {
    /// An encoder whose submits hold at most about `max_work` multiply-adds.
    pub fn new(gpu: Arc<Gpu>, max_work: u64) -> Self {
        let params_stride = u64::from(gpu.device.limits().min_uniform_buffer_offset_alignment).max(64);
        let params = gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("params"),
            size: params_stride * MAX_DISPATCHES,
            usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        Self {
            pipelines: Pipelines::new(Arc::clone(&gpu)),
            gpu,
            bind_groups: HashMap::new(),
            stubs: None,
            profile: None,
            params,
            params_stride,
            params_bytes: Vec::new(),
            recorded: Vec::new(),
            num_dispatches: 0,
            work: 0,
            max_work,
        }
    }

    /// Two buffers for bindings that a variant does not use.
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub fn stubs(&mut self) -> Result<[Arc<GpuBuffer>; 2], DeviceError> {
        if let Some(stubs) = &self.stubs {
            return Ok(stubs.clone());
        }
        let stub = || self.gpu.allocate("a stub", 16).map(Arc::new);
        let stubs = [stub()?, stub()?];
        self.stubs = Some(stubs.clone());
        Ok(stubs)
    }

    /// Keeps pipelines in this directory.
    pub fn keep_pipelines(&mut self, directory: &Path) {
        self.pipelines.keep_in(directory);
    }

    /// From now on nothing is recorded; which kernels would be is noted.
    pub fn start_rehearsal(&mut self) {
        self.pipelines.start_rehearsal();
    }

    /// Compiles the kernels that were noted.
    ///
    /// # Errors
    /// As [`Self::kernel`].
    pub fn finish_rehearsal(&mut self) -> Result<(), DeviceError> {
        self.pipelines.finish_rehearsal()
    }

    /// The kernel of a variant, compiled on first use.
    ///
    /// # Errors
    /// When the shader does not compile: the message holds naga's or the driver's words.
    pub fn kernel(&mut self, variant: &Variant) -> Result<Kernel, DeviceError> {
        self.pipelines.kernel(variant)
    }

    /// Records one dispatch: what is bound in binding order, without the parameters, which come last. `work` is an estimate
    /// in multiply-adds.
    ///
    /// # Errors
    /// When the grid is over the device's limit or a cut submit fails.
    pub fn dispatch(
        &mut self,
        kernel: &Kernel,
        bound: &[&dyn Bindable],
        params: &impl Pod,
        grid: [u32; 3],
        work: u64,
    ) -> Result<(), DeviceError> {
        let compiled = kernel.compiled.as_ref().filter(|_| !grid.contains(&0) && !self.pipelines.is_rehearsing());
        let Some(compiled) = compiled else { return Ok(()) };
        let limit = self.gpu.device.limits().max_compute_workgroups_per_dimension;
        if grid.iter().any(|&count| count > limit) {
            let reason = format!("a grid of {grid:?} workgroups, the limit is {limit} a dimension");
            return Err(DeviceError::Refused { what: format!("kernel {}", kernel.name), reason });
        }
        let bind_group = self.bind_group(kernel, &compiled.layout, bound);
        let params_offset = self.params_bytes.len() as u32;
        self.params_bytes.extend_from_slice(bytemuck::bytes_of(params));
        self.params_bytes.resize(params_offset as usize + self.params_stride as usize, 0);
        let title = self.profile.is_some().then(|| kernel.title.clone());
        let dispatch = Dispatch { title, work, pipeline: compiled.pipeline.clone(), bind_group, params_offset, grid };
        self.recorded.push(Recorded::Dispatch(dispatch));
        self.num_dispatches += 1;
        self.work += work;
        // A profile times so many a submit.
        let timed = self.profile.is_some() && self.recorded.len() == MAX_TIMED;
        if timed || self.work > self.max_work || self.params_bytes.len() as u64 == self.params_stride * MAX_DISPATCHES {
            self.submit()?;
        }
        Ok(())
    }

    /// Records a copy of the first `bytes` (a multiple of 4) of one buffer to another.
    pub fn copy(&mut self, from: &GpuBuffer, to: &GpuBuffer, bytes: u64) {
        assert!(bytes <= from.size && bytes <= to.size && bytes.is_multiple_of(4));
        if self.pipelines.is_rehearsing() {
            return;
        }
        let owned = |(buffer, offset): (&wgpu::Buffer, u64)| (buffer.clone(), offset);
        self.recorded.push(Recorded::Copy(Copy { from: owned(from.raw()), to: owned(to.raw()), bytes }));
    }

    /// Forgets a buffer that is about to be replaced, which bind groups would keep alive.
    pub fn forget(&mut self, buffer: &GpuBuffer) {
        self.bind_groups.retain(|(_, buffers), _| !buffers.contains(&buffer.id));
    }

    /// Begins to time every kernel; whether the device can.
    pub fn start_profile(&mut self) -> bool {
        self.profile = Profile::start(&self.gpu);
        self.profile.is_some()
    }

    /// Ends a profile: the times of all kernels since it began.
    pub fn finish_profile(&mut self) -> KernelTimes {
        self.profile.take().map(Profile::finish).unwrap_or_default()
    }

    /// Dispatches recorded since the start.
    pub fn num_dispatches(&self) -> u64 {
        self.num_dispatches
    }

    fn bind_group(
        &mut self,
        kernel: &Kernel,
        layout: &wgpu::BindGroupLayout,
        bound: &[&dyn Bindable],
    ) -> wgpu::BindGroup {
        let key = (kernel.id, bound.iter().map(|resource| resource.id()).collect::<Vec<_>>());
        if let Some(bind_group) = self.bind_groups.get(&key) {
            return bind_group.clone();
        }
        let mut entries: Vec<wgpu::BindGroupEntry<'_>> = Vec::with_capacity(bound.len() + 1);
        for (binding, resource) in bound.iter().enumerate() {
            entries.push(wgpu::BindGroupEntry { binding: binding as u32, resource: resource.resource() });
        }
        let size = std::num::NonZeroU64::new(self.params_stride);
        let resource = wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer: &self.params, offset: 0, size });
        entries.push(wgpu::BindGroupEntry { binding: bound.len() as u32, resource });
        let descriptor = wgpu::BindGroupDescriptor { label: Some(kernel.name), layout, entries: &entries };
        let bind_group = self.gpu.device.create_bind_group(&descriptor);
        self.bind_groups.insert(key, bind_group.clone());
        bind_group
    }

    /// Hands everything recorded to the queue.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn submit(&mut self) -> Result<(), DeviceError> {
        if self.recorded.is_empty() {
            return self.gpu.check();
        }
        self.gpu.queue.write_buffer(&self.params, 0, &self.params_bytes);
        let mut encoder =
            self.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("step") });
        let profile = &mut self.profile;
        let is_dispatch = |recorded: &Recorded| matches!(recorded, Recorded::Dispatch(_));
        // One pass for all, or one for each that is timed.
        let together = |a: &Recorded, b: &Recorded| is_dispatch(a) && is_dispatch(b) && profile.is_none();
        for run in self.recorded.chunk_by(together).collect::<Vec<_>>() {
            if let [Recorded::Copy(Copy { from, to, bytes })] = run {
                encoder.copy_buffer_to_buffer(&from.0, from.1, &to.0, to.1, *bytes);
                continue;
            }
            let timed = match run {
                [Recorded::Dispatch(Dispatch { title: Some(title), work, .. })] => Some((title, *work)),
                _ => None,
            };
            let timestamp_writes =
                profile.as_mut().zip(timed).map(|(profile, (title, work))| profile.around(title, work));
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: None, timestamp_writes });
            for recorded in run {
                let Recorded::Dispatch(dispatch) = recorded else { continue };
                pass.set_pipeline(&dispatch.pipeline);
                pass.set_bind_group(0, &dispatch.bind_group, &[dispatch.params_offset]);
                let [x, y, z] = dispatch.grid;
                pass.dispatch_workgroups(x, y, z);
            }
        }
        if let Some(profile) = profile {
            profile.resolve(&mut encoder);
        }
        self.gpu.queue.submit([encoder.finish()]);
        if let Some(profile) = profile {
            profile.collect(&self.gpu)?;
        }
        self.recorded.clear();
        self.params_bytes.clear();
        self.work = 0;
        self.gpu.check()
    }
}
