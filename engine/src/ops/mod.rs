//! The one trait of model ops, implemented by `cpu` (plain Rust and rayon) and `wgpu` (WGSL dispatches).
//!
//! Called by the model definitions. A step is: `begin` with the batch, the model's ops in order, `select`. Invariant 7 of
//! ARCHITECTURE.md holds for both: the order in which an output element is summed depends on its own row and position.

pub mod ceiling;
pub mod cpu;
pub mod rotary;
pub mod wgpu;

use bytes::Bytes;

use crate::batch::{ModelInput, Selected};
use crate::kernels::KernelTimes;
use crate::kv::{BlockId, Load};
use crate::model::{Activation, LayerConfig, ModelConfig};
use crate::model_file::Tensor;

/// A device that failed. Everything in flight on it is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// An allocation does not fit.
    #[error("the device cannot hold {bytes} bytes for {what}: {reason}")]
    OutOfMemory {
        /// What the memory is for.
        what: String,
        /// Bytes asked for.
        bytes: u64,
        /// The device's words.
        reason: String,
    },
    /// A shader did not compile or a dispatch was refused.
    #[error("the device refused {what}: {reason}")]
    Refused {
        /// Kernel or operation.
        what: String,
        /// The device's words.
        reason: String,
    },
    /// The device is gone.
    #[error("the device was lost: {0}")]
    Lost(String),
}

/// Which rows an op covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// All rows of the step.
    Step,
    /// The gathered rows whose logits are wanted.
    Logits,
}

/// How a product lands in its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// Overwrites.
    Store,
    /// Adds to what is there: the residual.
    Accumulate,
}

/// One layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Which of the rotary tables; `None` rotates nothing.
    pub rotary: Option<usize>,
    /// Tokens that a query sees, itself included; 0 for all before it.
    pub window: u32,
    /// Scores are multiplied by this.
    pub scale: f32,
    /// Scores s become cap · tanh(s / cap); 0 leaves them.
    pub soft_cap: f32,
}

impl Attention {
    /// That of a layer of a model.
    pub fn of(config: &ModelConfig, layer: usize) -> Self {
        let LayerConfig { rotary, window } = config.layers[layer];
        Self {
            rotary,
            window: window.map_or(0, |window| u32::try_from(window).unwrap_or(0)),
            scale: config.attention_scale,
            soft_cap: config.attention_soft_cap.unwrap_or(0.0),
        }
    }

    /// All tokens before a query, unrotated, scaled by the width of a head.
    pub fn plain(head_dim: usize) -> Self {
        Self { rotary: None, window: 0, scale: 1.0 / (head_dim as f32).sqrt(), soft_cap: 0.0 }
    }

    /// The first token that the query at `position` sees.
    pub fn first_token(&self, position: usize) -> usize {
        if self.window == 0 { 0 } else { (position + 1).saturating_sub(self.window as usize) }
    }
}

/// The ops of decoders on one device.
pub trait Ops: Sized {
    /// Activations: `[max rows, width]`, f32.
    type Buffer;
    /// A weight matrix as stored, quantised.
    type Matrix;
    /// A weight vector, f32.
    type Vector;

    /// Allocates activations.
    ///
    /// # Errors
    /// When the device cannot hold them.
    fn buffer(&mut self, max_rows: usize, width: usize) -> Result<Self::Buffer, DeviceError>;

    /// Brings a weight matrix to the device: tensors of equal columns, one below the other.
    ///
    /// # Errors
    /// When the device cannot hold it.
    fn matrix(&mut self, tensors: &[Tensor]) -> Result<Self::Matrix, DeviceError>;

    /// Brings a weight vector to the device.
    ///
    /// # Errors
    /// When the device cannot hold it.
    fn vector(&mut self, name: &str, values: &[f32]) -> Result<Self::Vector, DeviceError>;

    /// Starts a step: uploads its tokens, positions and block tables.
    ///
    /// # Errors
    /// When the device has failed.
    fn begin(&mut self, input: &ModelInput) -> Result<(), DeviceError>;

    /// output[row] = table[token of row] · scale
    ///
    /// # Errors
    /// When the device has failed; so for every op below.
    fn embedding(&mut self, table: &Self::Matrix, scale: f32, output: &mut Self::Buffer) -> Result<(), DeviceError>;

    /// output (+)= input / rms(input) · weight
    ///
    /// # Errors
    /// When the device has failed.
    fn rms_norm(
        &mut self,
        input: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        output: &mut Self::Buffer,
        write: Write,
        rows: Rows,
    ) -> Result<(), DeviceError>;

    /// output (+)= input · matrixᵀ
    ///
    /// # Errors
    /// When the device has failed.
    fn linear(
        &mut self,
        input: &Self::Buffer,
        matrix: &Self::Matrix,
        output: &mut Self::Buffer,
        write: Write,
        rows: Rows,
    ) -> Result<(), DeviceError>;

    /// Adds a vector to every row of the step.
    ///
    /// # Errors
    /// When the device has failed.
    fn add_bias(&mut self, values: &mut Self::Buffer, bias: &Self::Vector) -> Result<(), DeviceError>;

    /// Takes the step's queries, keys and values apart: normalises the heads of the first two (`norms`: query heads' weights,
    /// then key heads', and ε), rotates them by their rows' positions, and puts queries into `query`, keys and values into
    /// their slots of `layer`'s cache.
    ///
    /// # Errors
    /// When the device has failed.
    fn rotate_and_cache(
        &mut self,
        layer: usize,
        attention: &Attention,
        qkv: &Self::Buffer,
        norms: Option<(&Self::Vector, f32)>,
        query: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Causal attention of every row over its sequence's blocks in `layer`'s cache.
    ///
    /// # Errors
    /// When the device has failed.
    fn paged_attention(
        &mut self,
        layer: usize,
        attention: &Attention,
        query: &Self::Buffer,
        output: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// output = activation(gate) · up, of rows that hold both side by side.
    ///
    /// # Errors
    /// When the device has failed.
    fn act_and_mul(
        &mut self,
        gate_up: &Self::Buffer,
        activation: Activation,
        output: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// logits = cap · tanh(logits / cap), of the rows whose logits are wanted.
    ///
    /// # Errors
    /// When the device has failed.
    fn soft_cap(&mut self, logits: &mut Self::Buffer, cap: f32) -> Result<(), DeviceError>;

    /// Copies the rows whose logits are wanted to the front of `output`.
    ///
    /// # Errors
    /// When the device has failed.
    fn gather_rows(&mut self, input: &Self::Buffer, output: &mut Self::Buffer) -> Result<(), DeviceError>;

    /// Ends the step: runs what was recorded and reads back what the batch selects of each logits row.
    ///
    /// # Errors
    /// When the device has failed.
    fn select(&mut self, logits: &Self::Buffer) -> Result<Vec<Selected>, DeviceError>;

    /// Copies KV blocks out of the pool, then others into it, before whatever is recorded next.
    ///
    /// # Errors
    /// When the device has failed.
    fn copy_blocks(&mut self, stores: &[BlockId], loads: &[Load]) -> Result<(), DeviceError>;

    /// The canonical payloads of the blocks that were copied out last, in their order.
    ///
    /// # Errors
    /// When the device has failed.
    fn copied_out(&mut self) -> Result<Vec<Bytes>, DeviceError>;

    /// What computes here, as a class of equal bits: up to 16 letters.
    fn numerics(&self) -> String;

    /// From now on steps are rehearsed: what they would run is noted and not run. Whether there is anything to compile.
    fn start_rehearsal(&mut self) -> bool {
        false
    }

    /// Compiles what the rehearsed steps would have run.
    ///
    /// # Errors
    /// When a kernel does not compile.
    fn finish_rehearsal(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Copies so many bytes on the device, and waits for it.
    ///
    /// # Errors
    /// When the device fails.
    fn copy_bytes(&mut self, bytes: usize) -> Result<(), DeviceError>;

    /// Begins to time every kernel; whether the device can.
    fn start_profile(&mut self) -> bool {
        false
    }

    /// The times of all kernels since a profile began.
    fn finish_profile(&mut self) -> KernelTimes {
        KernelTimes::new()
    }

    /// Kernels dispatched since the start.
    fn num_dispatches(&self) -> u64 {
        0
    }

    /// Device memory allocated, bytes.
    fn memory_bytes(&self) -> u64;
}
