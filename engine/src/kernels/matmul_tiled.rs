//! Wrapper of `matmul_tiled.wgsl`: the prompt tokens of a step on hardware; and whether an adapter's arithmetic can be trusted.

use shaders::{MATMUL_TILED, Value, Variant, params};

use super::{Bindable, DeviceMatrix, Encoder, Gpu, GpuBuffer, Plan, matmul};
use crate::model_file::{StorageType, Tensor};
use crate::ops::DeviceError;

/// How a tile's products are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// In f32.
    F32,
    /// Products and their sums within a block in half precision.
    F16,
    /// By matrices of 8 × 8, f16 into f32.
    Matrix8,
    /// By matrices of 16 × 16, f16 into f32.
    Matrix16,
}

impl Arithmetic {
    /// The placeholder's value, and what people call it.
    pub fn word(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Matrix8 => "matrix8",
            Self::Matrix16 => "matrix16",
        }
    }
}

/// Rows and tokens of a workgroup's tile.
const TILE: u32 = 64;

/// `output` (tokens × rows) (+)= `input` (tokens × columns) · `matrix`ᵀ for tokens `first_token..num_tokens`; one dispatch a
/// shard, whose weights lie in buffers.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
#[expect(clippy::too_many_arguments, reason = "the op's operands")]
pub fn matmul_tiled(
    encoder: &mut Encoder,
    arithmetic: Arithmetic,
    matrix: &DeviceMatrix,
    input: &GpuBuffer,
    output: &GpuBuffer,
    first_token: u32,
    num_tokens: u32,
    accumulate: bool,
) -> Result<(), DeviceError> {
    let tokens = u64::from(num_tokens);
    assert!(tokens * matrix.columns as u64 * 4 <= input.size && tokens * matrix.rows as u64 * 4 <= output.size);
    for shard in &matrix.shards {
        assert!(!shard.in_images(), "a tiled product of weights in images");
        let values = [("ARITHMETIC", Value::Word(arithmetic.word())), ("FORMAT", Value::Word(shard.format.word()))];
        let kernel = encoder.kernel(&Variant::new(&MATMUL_TILED, &values))?;
        let params = params::MatmulTiled {
            num_rows: shard.num_rows,
            row_start: shard.row_start,
            num_blocks: matrix.num_blocks(),
            num_tokens,
            output_stride: matrix.rows as u32,
            accumulate: accumulate.into(),
            first_token,
            ..Default::default()
        };
        let grid = [shard.num_rows.div_ceil(TILE), (num_tokens - first_token).div_ceil(TILE), 1];
        let work = u64::from(num_tokens - first_token) * u64::from(shard.num_rows) * matrix.columns as u64;
        let bound: [&dyn Bindable; 4] = [&shard.weights, &shard.scales, input, output];
        encoder.dispatch(&kernel, &bound, &params, grid, work)?;
    }
    Ok(())
}

/// Rows, columns and tokens of the trial: more than a tile of each, and no whole number of them.
const TRIAL: [usize; 3] = [70, 96, 67];
/// How far an element may be off, as a part of the root of its number of products: these are below 1, in half precision.
const TRIAL_BOUND: f32 = 4e-3;

/// Whether a product in this arithmetic is what [`matmul`] makes of it. Matrix arithmetic is a driver's, and there are more
/// drivers than anybody tests, so it is tried before it is used.
///
/// # Errors
/// When the device fails. A kernel that does not compile is one that does not agree.
pub fn agrees(gpu: &Gpu, encoder: &mut Encoder, plan: &Plan, arithmetic: Arithmetic) -> Result<bool, DeviceError> {
    let [rows, columns, tokens] = TRIAL;
    // Multiples of 1/128 between -1 and 1, which half precision holds: no two neighbours alike.
    let values = |len: usize, step: usize| (0..len).map(move |i| (i * step % 255) as f32 / 128.0 - 1.0);
    let weights: Vec<u8> = values(rows * columns, 89).flat_map(f32::to_le_bytes).collect();
    let tensor = Tensor::owned("a trial", StorageType::F32, rows, columns, weights);
    let matrix = DeviceMatrix::upload(gpu, &[tensor], plan.placement(gpu))?;
    let input: Vec<f32> = values(tokens * columns, 67).collect();
    let input = gpu.upload("a trial", bytemuck::cast_slice(&input))?;
    let unwritten = vec![f32::NAN; tokens * rows];
    let outputs = [(); 2].map(|()| gpu.upload("a trial", bytemuck::cast_slice(&unwritten)));
    let [expected, got] = outputs;
    let (expected, got) = (expected?, got?);
    matmul(encoder, plan.several, &matrix, &input, &expected, tokens as u32, false)?;
    let tried = matmul_tiled(encoder, arithmetic, &matrix, &input, &got, 0, tokens as u32, false);
    if let Err(error) = tried {
        tracing::warn!(%error, arithmetic = arithmetic.word(), "an arithmetic of this adapter does not work");
        return encoder.submit().map(|()| false);
    }
    encoder.submit()?;
    let bytes = (tokens * rows * 4) as u64;
    let read = gpu.read(&[(&expected, bytes), (&got, bytes)])?;
    let floats: Vec<Vec<f32>> = read.iter().map(|bytes| bytemuck::pod_collect_to_vec(bytes)).collect();
    let bound = TRIAL_BOUND * (columns as f32).sqrt();
    let worst = floats[0].iter().zip(&floats[1]).map(|(a, b)| (a - b).abs());
    // A NaN is not below the bound.
    let is_near = worst.clone().all(|off| off <= bound);
    if !is_near {
        let worst = worst.fold(0.0, f32::max);
        tracing::warn!(worst, bound, arithmetic = arithmetic.word(), "an arithmetic of this adapter is wrong");
    }
    Ok(is_near)
}
