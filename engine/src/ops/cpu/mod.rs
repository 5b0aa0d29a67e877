//! The ops in plain Rust and rayon, for machines without a GPU and as the other opinion in every test.
//!
//! Weights stay in the file's memory map, quantised; a row is unpacked into a scratch of one row when it is dotted. Every
//! sum runs in a fixed order of fused multiply-adds, so results are the same on any CPU, batch and chunking.

mod attention;
mod copy;
mod dot;
mod exp;
mod matmul;
mod select;

use bytes::Bytes;
use half::f16;
use half::slice::HalfBitsSliceExt;
use rayon::prelude::*;

use super::rotary::Rotary;
use super::{DeviceError, Ops, Rows, Write};
use crate::batch::{ModelInput, Selected};
use crate::gguf::Tensor;
use crate::kv::{BlockId, KvLayout, Load};

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

/// K and V of one layer, `[block, kv_head, offset, head_dim]`, f16 as bits: zeroed integers cost no memory until written.
struct LayerCache {
    key: Vec<u16>,
    value: Vec<u16>,
}

/// The `cpu` device.
pub struct CpuOps {
    layout: KvLayout,
    rotary: Rotary,
    pair_stride: usize,
    cache: Vec<LayerCache>,
    input: ModelInput,
    rotations: Vec<[f32; 2]>,
    /// Scratch of the matrix product.
    products: Vec<f32>,
    /// Blocks that were copied out.
    outgoing: Vec<Bytes>,
}

impl CpuOps {
    /// Allocates the KV cache.
    ///
    /// # Errors
    /// When the system has no room for it.
    pub fn new(layout: KvLayout, rotary: Rotary) -> Result<Self, DeviceError> {
        let len = layout.num_blocks * layout.block_values();
        // Reserving first turns a refusal of the system into an error; the zeroed pages themselves come when written.
        let reserved = Vec::<u16>::new().try_reserve_exact(len.saturating_mul(2 * layout.num_layers));
        reserved.map_err(|error| DeviceError::OutOfMemory {
            what: "the KV cache".into(),
            bytes: layout.total_bytes(),
            reason: error.to_string(),
        })?;
        let cache = (0..layout.num_layers).map(|_| LayerCache { key: vec![0; len], value: vec![0; len] }).collect();
        // Neighbouring pairs: the order of GGUF's llama.
        Ok(Self {
            layout,
            rotary,
            pair_stride: 1,
            cache,
            input: ModelInput::default(),
            rotations: Vec::new(),
            products: Vec::new(),
            outgoing: Vec::new(),
        })
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
    type Matrix = Tensor;
    type Vector = Vec<f32>;

    fn buffer(&mut self, max_rows: usize, width: usize) -> Result<Buffer, DeviceError> {
        Ok(Buffer { values: vec![0.0; max_rows * width], width })
    }

    fn matrix(&mut self, tensor: &Tensor) -> Result<Tensor, DeviceError> {
        Ok(tensor.clone())
    }

    fn vector(&mut self, tensor: &Tensor) -> Result<Vec<f32>, DeviceError> {
        Ok(tensor.to_f32())
    }

    fn begin(&mut self, input: &ModelInput) -> Result<(), DeviceError> {
        self.input = input.clone();
        self.rotations = self.rotary.table(&input.positions);
        Ok(())
    }

    fn embedding(&mut self, table: &Tensor, output: &mut Buffer) -> Result<(), DeviceError> {
        let width = output.width;
        let rows = output.rows_mut(self.input.num_rows()).chunks_exact_mut(width);
        for (row, &token) in rows.zip(&self.input.token_ids) {
            crate::gguf::dequantize_row(table.storage, table.row(token as usize), row);
        }
        Ok(())
    }

    fn rms_norm(
        &mut self,
        input: &Buffer,
        weight: &Vec<f32>,
        eps: f32,
        output: &mut Buffer,
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
            for ((output, x), w) in output.iter_mut().zip(input).zip(weight) {
                *output = x * scale * w;
            }
        });
        Ok(())
    }

    fn linear(
        &mut self,
        input: &Buffer,
        matrix: &Tensor,
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

    fn rotary_embedding(&mut self, values: &mut Buffer, num_heads: usize) -> Result<(), DeviceError> {
        let num_rows = self.input.num_rows();
        let width = values.width;
        let head_dim = width / num_heads;
        let num_pairs = self.rotary.num_pairs();
        let stride = self.pair_stride;
        let rotations = self.rotations.par_chunks_exact(num_pairs);
        let rows = values.rows_mut(num_rows).par_chunks_exact_mut(width).zip(rotations);
        rows.with_min_len(ALONE_VALUES / width).for_each(|(row, rotations)| {
            for head in row.chunks_exact_mut(head_dim) {
                for (pair, &[cos, sin]) in rotations.iter().enumerate() {
                    let first = if stride == 1 { 2 * pair } else { pair };
                    let (a, b) = (head[first], head[first + stride]);
                    head[first] = a.mul_add(cos, -(b * sin));
                    head[first + stride] = a.mul_add(sin, b * cos);
                }
            }
        });
        Ok(())
    }

    fn reshape_and_cache(&mut self, layer: usize, key: &Buffer, value: &Buffer) -> Result<(), DeviceError> {
        let layout = &self.layout;
        let cache = &mut self.cache[layer];
        for (row, &slot) in self.input.slot_mapping.iter().enumerate() {
            for head in 0..layout.num_kv_heads {
                let source = (row * layout.num_kv_heads + head) * layout.head_dim;
                let target = layout.slot_base(slot as usize, head);
                for i in 0..layout.head_dim {
                    cache.key[target + i] = f16::from_f32(key.values[source + i]).to_bits();
                    cache.value[target + i] = f16::from_f32(value.values[source + i]).to_bits();
                }
            }
        }
        Ok(())
    }

    fn paged_attention(&mut self, layer: usize, query: &Buffer, output: &mut Buffer) -> Result<(), DeviceError> {
        let cache = &self.cache[layer];
        let num_rows = self.input.num_rows();
        attention::paged_attention(
            &self.layout,
            cache.key.reinterpret_cast(),
            cache.value.reinterpret_cast(),
            &self.input.sequences,
            query.rows(num_rows),
            output.rows_mut(num_rows),
        );
        Ok(())
    }

    fn silu_and_mul(&mut self, gate: &mut Buffer, up: &Buffer) -> Result<(), DeviceError> {
        let num_rows = self.input.num_rows();
        let up = up.rows(num_rows).par_chunks(4096);
        let arch = pulp::Arch::new();
        gate.rows_mut(num_rows).par_chunks_mut(4096).zip(up).for_each(|(gate, up)| {
            arch.dispatch(SiluAndMul { gate, up });
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

    fn numerics(&self) -> String {
        "cpu-f32".to_owned()
    }

    fn memory_bytes(&self) -> u64 {
        self.layout.total_bytes()
    }
}

/// gate = gate / (1 + e^−gate) · up
struct SiluAndMul<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl pulp::WithSimd for SiluAndMul<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _simd: S) {
        for (gate, up) in self.gate.iter_mut().zip(self.up) {
            *gate = *gate / (1.0 + exp::exp(-*gate)) * up;
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
