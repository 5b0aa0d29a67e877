//! The ops in plain Rust and rayon, for machines without a GPU and as the other opinion in every test.
//!
//! Weights stay in the file's memory map, quantised; a row is unpacked into a scratch of one row when it is dotted. Every
//! sum runs in a fixed order of fused multiply-adds, so results are the same on any CPU, batch and chunking.

mod attention;
mod cached_row;
mod copy;
mod dot;
mod exp;
mod matmul;
mod matrix;
mod rotate;
mod select;

use bytes::Bytes;
use rayon::prelude::*;

use super::rotary::Rotary;
use super::{Attention, DeviceError, Ops, Rows, Write};
use crate::batch::{ModelInput, Selected};
use crate::kv::{BlockId, KvLayout, Load};
use crate::model::{Activation, PairOrder};
use crate::model_file::Tensor;
pub use matrix::Matrix;

/// Values that one thread goes over sooner than another is woken.
const ALONE_VALUES: usize = 16 << 10;

/// Activations: row-major `[max rows, width]`.
pub struct Buffer {
    values: Vec<f32>,
    width: usize,
}

impl Buffer {
    /// All values, row-major: for tests.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    fn rows(&self, num_rows: usize) -> &[f32] {
        &self.values[..num_rows * self.width]
    }

    fn rows_mut(&mut self, num_rows: usize) -> &mut [f32] {
        &mut self.values[..num_rows * self.width]
    }
}

/// K and V of one layer as `KvLayout` says, by pairs of bytes: zeroed integers cost no memory until written.
struct LayerCache {
    key: Vec<u16>,
    value: Vec<u16>,
}

/// The `cpu` device.
pub struct CpuOps {
    layout: KvLayout,
    rotaries: Vec<Rotary>,
    pair_order: PairOrder,
    cache: Vec<LayerCache>,
    input: ModelInput,
    /// (cos, sin) by table, row and pair.
    rotations: Vec<Vec<[f32; 2]>>,
    /// Scratch of the matrix product.
    products: Vec<f32>,
    /// Blocks that were copied out.
    outgoing: Vec<Bytes>,
    /// Between these bytes are copied to see how fast that is.
    copied: Vec<Vec<u8>>,
}

impl CpuOps {
    /// Allocates the KV cache.
    ///
    /// # Errors
    /// When the system has no room for it.
    pub fn new(layout: KvLayout, rotaries: Vec<Rotary>, pair_order: PairOrder) -> Result<Self, DeviceError> {
        let len = layout.num_blocks * layout.block_bytes() / 2;
        // Reserving first turns a refusal of the system into an error; the zeroed pages themselves come when written.
        let reserved = Vec::<u16>::new().try_reserve_exact(len.saturating_mul(2 * layout.num_layers));
        reserved.map_err(|error| DeviceError::OutOfMemory {
            what: "the KV cache".into(),
            bytes: layout.total_bytes(),
            reason: error.to_string(),
        })?;
        let cache = (0..layout.num_layers).map(|_| LayerCache { key: vec![0; len], value: vec![0; len] }).collect();
        Ok(Self {
            layout,
            rotaries,
            pair_order,
            cache,
            input: ModelInput::default(),
            rotations: Vec::new(),
            products: Vec::new(),
            outgoing: Vec::new(),
            copied: Vec::new(),
        })
    }

    /// The cache's shape.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    fn num_rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::Step => self.input.num_rows(),
            Rows::Logits => self.input.selections.len(),
        }
    }
}

impl Ops for CpuOps {
    type Buffer = Buffer;
    type Matrix = Matrix;
    type Vector = Vec<f32>;

    fn buffer(&mut self, max_rows: usize, width: usize) -> Result<Buffer, DeviceError> {
        Ok(Buffer { values: vec![0.0; max_rows * width], width })
    }

    fn matrix(&mut self, tensors: &[Tensor]) -> Result<Matrix, DeviceError> {
        Matrix::of(tensors)
    }

    fn vector(&mut self, _name: &str, values: &[f32]) -> Result<Vec<f32>, DeviceError> {
        Ok(values.to_vec())
    }

    fn begin(&mut self, input: &ModelInput) -> Result<(), DeviceError> {
        self.input = input.clone();
        self.rotations = self.rotaries.iter().map(|rotary| rotary.table(&input.positions)).collect();
        Ok(())
    }

    fn embedding(&mut self, table: &Matrix, scale: f32, output: &mut Buffer) -> Result<(), DeviceError> {
        let width = output.width;
        let rows = output.rows_mut(self.input.num_rows()).chunks_exact_mut(width);
        for (row, &token) in rows.zip(&self.input.token_ids) {
            let (storage, bytes) = table.row(token as usize);
            crate::model_file::dequantize_row(storage, bytes, row);
            if scale != 1.0 {
                row.iter_mut().for_each(|value| *value *= scale);
            }
        }
        Ok(())
    }

    fn rms_norm(
        &mut self,
        input: &Buffer,
        weight: &Vec<f32>,
        eps: f32,
        output: &mut Buffer,
        write: Write,
        rows: Rows,
    ) -> Result<(), DeviceError> {
        let num_rows = self.num_rows(rows);
        let width = weight.len();
        let arch = pulp::Arch::new();
        let source = input.rows(num_rows).par_chunks_exact(width);
        let rows = output.values[..num_rows * width].par_chunks_exact_mut(width).zip(source);
        rows.with_min_len(ALONE_VALUES / width).for_each(|(output, input)| {
            let squares = arch.dispatch(matmul::SumOfSquares(input));
            let scale = 1.0 / (squares / width as f32 + eps).sqrt();
            let values = output.iter_mut().zip(input).zip(weight);
            match write {
                Write::Store => values.for_each(|((output, x), w)| *output = x * scale * w),
                Write::Accumulate => values.for_each(|((output, x), w)| *output += x * scale * w),
            }
        });
        Ok(())
    }

    fn linear(
        &mut self,
        input: &Buffer,
        matrix: &Matrix,
        output: &mut Buffer,
        write: Write,
        rows: Rows,
    ) -> Result<(), DeviceError> {
        let num_rows = self.num_rows(rows);
        // The input may be wider than the matrix only when a buffer is shared between row sets; its rows are packed.
        let input = &input.values[..num_rows * matrix.columns];
        let output = &mut output.values[..num_rows * matrix.rows];
        matmul::matmul(matrix, input, output, &mut self.products, write);
        Ok(())
    }

    fn add_bias(&mut self, values: &mut Buffer, bias: &Vec<f32>) -> Result<(), DeviceError> {
        for row in values.rows_mut(self.input.num_rows()).chunks_exact_mut(bias.len()) {
            row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
        }
        Ok(())
    }

    fn rotate_and_cache(
        &mut self,
        layer: usize,
        attention: &Attention,
        qkv: &Buffer,
        norms: Option<(&Vec<f32>, f32)>,
        query: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let heads = rotate::Heads {
            layout: &self.layout,
            rotations: attention.rotary.map(|table| self.rotations[table].as_slice()),
            num_pairs: attention.rotary.map_or(0, |table| self.rotaries[table].num_pairs()),
            pair_order: self.pair_order,
            norms: norms.map(|(weights, eps)| (weights.as_slice(), eps)),
        };
        let num_rows = self.input.num_rows();
        let query = &mut query.values[..num_rows * self.layout.num_heads * self.layout.head_dim];
        heads.queries(qkv.rows(num_rows), query);
        let cache = &mut self.cache[layer];
        heads.keys_and_values(qkv.rows(num_rows), &self.input.slot_mapping, &mut cache.key, &mut cache.value);
        Ok(())
    }

    fn paged_attention(
        &mut self,
        layer: usize,
        attention: &Attention,
        query: &Buffer,
        output: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let cache = &self.cache[layer];
        let num_rows = self.input.num_rows();
        attention::paged_attention(
            &self.layout,
            attention,
            &cache.key,
            &cache.value,
            &self.input.sequences,
            query.rows(num_rows),
            output.rows_mut(num_rows),
        );
        Ok(())
    }

    fn act_and_mul(
        &mut self,
        gate_up: &Buffer,
        activation: Activation,
        output: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let num_rows = self.input.num_rows();
        let (width, arch) = (output.width, pulp::Arch::new());
        let rows = output.values[..num_rows * width].par_chunks_exact_mut(width);
        let rows = rows.zip(gate_up.rows(num_rows).par_chunks_exact(2 * width));
        rows.with_min_len((ALONE_VALUES / width).max(1)).for_each(|(output, gate_up)| {
            let (gate, up) = gate_up.split_at(width);
            arch.dispatch(ActAndMul { gate, up, activation, output });
        });
        Ok(())
    }

    fn soft_cap(&mut self, logits: &mut Buffer, cap: f32) -> Result<(), DeviceError> {
        let num_values = self.input.selections.len() * logits.width;
        logits.values[..num_values].par_chunks_mut(4096).for_each(|values| {
            values.iter_mut().for_each(|value| *value = exp::soft_cap(*value, cap));
        });
        Ok(())
    }

    fn gather_rows(&mut self, input: &Buffer, output: &mut Buffer) -> Result<(), DeviceError> {
        let width = input.width;
        for (target, selection) in output.values.chunks_exact_mut(width).zip(&self.input.selections) {
            target.copy_from_slice(&input.values[selection.row * width..][..width]);
        }
        Ok(())
    }

    fn select(&mut self, logits: &Buffer) -> Result<Vec<Selected>, DeviceError> {
        let rows = logits.values.par_chunks_exact(logits.width);
        Ok(rows.zip(&self.input.selections).map(|(row, selection)| select::select_row(row, selection)).collect())
    }

    fn copy_blocks(&mut self, stores: &[BlockId], loads: &[Load]) -> Result<(), DeviceError> {
        self.outgoing = stores.iter().map(|&block_id| self.gather_block(block_id)).collect();
        loads.iter().for_each(|load| self.scatter_block(load));
        Ok(())
    }

    fn copied_out(&mut self) -> Result<Vec<Bytes>, DeviceError> {
        Ok(std::mem::take(&mut self.outgoing))
    }

    fn copy_bytes(&mut self, bytes: usize) -> Result<(), DeviceError> {
        if self.copied.first().map(Vec::len) != Some(bytes) {
            self.copied = vec![vec![1; bytes]; 2];
        }
        if let [from, to] = &mut self.copied[..] {
            to.par_chunks_mut(1 << 20).zip(from.par_chunks(1 << 20)).for_each(|(to, from)| to.copy_from_slice(from));
        }
        Ok(())
    }

    fn numerics(&self) -> String {
        format!("cpu-f32{}", self.layout.numerics())
    }

    fn memory_bytes(&self) -> u64 {
        self.layout.total_bytes()
    }
}

/// output = activation(gate) · up
struct ActAndMul<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    activation: Activation,
    output: &'a mut [f32],
}

impl pulp::WithSimd for ActAndMul<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _simd: S) {
        let values = self.output.iter_mut().zip(self.gate).zip(self.up);
        match self.activation {
            Activation::Silu => values.for_each(|((output, gate), up)| *output = gate / (1.0 + exp::exp(-gate)) * up),
            // ½ (1 + tanh u) = 1 / (1 + e^−2u), with u = √(2/π) (x + 0.044715 x³).
            Activation::Gelu => values.for_each(|((output, gate), up)| {
                let u = 0.797_884_6 * gate * (0.044_715 * gate * gate + 1.0);
                *output = gate / (1.0 + exp::exp(-2.0 * u)) * up;
            }),
        }
    }
}

/// Uses this many threads instead of one a core. To be called once, before any other op.
///
/// # Errors
/// When the threads are running already or cannot be started.
pub fn use_threads(threads: usize) -> Result<(), rayon::ThreadPoolBuildError> {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()
}
