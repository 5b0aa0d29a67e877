//! Buffers with sentinels and guards, seeded inputs, and comparison with a tolerance.

use std::sync::Arc;

use engine::device::Traits;
use engine::kernels::{DeviceMatrix, Encoder, Gpu, GpuBuffer, Placement, Plan};
use engine::model_file::Tensor;

/// Pre-fills outputs: a NaN with a payload that no kernel computes, so that "wrote nothing" shows.
pub const SENTINEL: u32 = 0x7fc0_dead;
/// Words after an output that must stay as they were.
const GUARD_WORDS: usize = 64;

/// How close a value must be: |a − b| ≤ abs + rel · |b|.
#[derive(Clone, Copy)]
pub struct Tolerance {
    pub abs: f64,
    pub rel: f64,
}

/// f32 arithmetic in another order.
pub const F32: Tolerance = Tolerance { abs: 1e-5, rel: 1e-4 };
/// Through exp and f16 caches (the reference reads the same f16 values).
pub const ATTENTION: Tolerance = Tolerance { abs: 2e-5, rel: 2e-4 };
/// To the bit.
pub const EXACT: Tolerance = Tolerance { abs: 0.0, rel: 0.0 };

/// The device, the recorder, and counters.
pub struct Harness {
    pub gpu: Arc<Gpu>,
    pub encoder: Encoder,
    /// Hardware's and software's variants are all run here, and what this device itself would choose.
    pub plans: [Plan; 3],
    pub num_comparisons: usize,
    seed: u64,
}

/// An output with its guard.
pub struct Output {
    pub buffer: GpuBuffer,
    len: usize,
}

impl Harness {
    pub fn new(gpu: Arc<Gpu>) -> Self {
        let encoder = Encoder::new(Arc::clone(&gpu), u64::MAX);
        let traits = gpu.info.traits;
        let hardware = Traits { software: false, ..traits };
        let software = Traits { software: true, ..Traits::default() };
        let plans = [hardware, software, Traits { software: true, ..traits }].map(Plan::choose);
        Self { gpu, encoder, plans, num_comparisons: 0, seed: 1 }
    }

    /// `len` values in −1..1, another sequence each call.
    pub fn random(&mut self, len: usize) -> Vec<f32> {
        self.seed += 1;
        let mut state = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            })
            .collect()
    }

    /// A tensor as a matrix, in buffers, and in images where the device reads those.
    pub fn matrices(&self, tensor: &Tensor, max_binding_bytes: u64) -> Vec<DeviceMatrix> {
        let max_binding_bytes = max_binding_bytes.min(self.gpu.max_binding_bytes());
        let image_rows = self.gpu.info.traits.image_rows.map(Some);
        [None]
            .into_iter()
            .chain(image_rows)
            .map(|image_rows| {
                let placement = Placement { max_binding_bytes, image_rows };
                DeviceMatrix::upload(&self.gpu, std::slice::from_ref(tensor), placement).unwrap()
            })
            .collect()
    }

    pub fn upload<T: bytemuck::Pod>(&self, values: &[T]) -> GpuBuffer {
        self.gpu.upload("test input", bytemuck::cast_slice(values)).unwrap()
    }

    /// An output of `len` words, all sentinel, guard included.
    pub fn output(&self, len: usize) -> Output {
        Output { buffer: self.upload(&vec![SENTINEL; len + GUARD_WORDS]), len }
    }

    /// An output that starts as `values`.
    pub fn output_of(&self, values: &[f32]) -> Output {
        let mut words: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
        words.resize(values.len() + GUARD_WORDS, SENTINEL);
        Output { buffer: self.upload(&words), len: values.len() }
    }

    /// Submits, reads an output's words back and checks its guard.
    pub fn words(&mut self, label: &str, output: &Output) -> Vec<u32> {
        self.encoder.submit().unwrap();
        let bytes = self.gpu.read(&[(&output.buffer, ((output.len + GUARD_WORDS) * 4) as u64)]).unwrap().remove(0);
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&bytes);
        let guard = &words[output.len..];
        assert!(guard.iter().all(|&word| word == SENTINEL), "{label}: wrote past the end of its output");
        words[..output.len].to_vec()
    }

    pub fn floats(&mut self, label: &str, output: &Output) -> Vec<f32> {
        self.words(label, output).into_iter().map(f32::from_bits).collect()
    }

    /// Compares an output with its reference; no sentinel may survive.
    pub fn compare(&mut self, label: &str, output: &Output, reference: &[f64], tolerance: Tolerance) {
        let words = self.words(label, output);
        assert_eq!(words.len(), reference.len(), "{label}: length");
        let mut worst = (0.0f64, 0usize);
        for (index, (&word, &wanted)) in words.iter().zip(reference).enumerate() {
            assert_ne!(word, SENTINEL, "{label}: element {index} was not written");
            let got = f64::from(f32::from_bits(word));
            let excess = (got - wanted).abs() / (tolerance.abs + tolerance.rel * wanted.abs()).max(f64::MIN_POSITIVE);
            assert!(!got.is_nan(), "{label}: element {index} is NaN, should be {wanted}");
            if excess > worst.0 {
                worst = (excess, index);
            }
        }
        let (excess, index) = worst;
        assert!(
            excess <= 1.0,
            "{label}: element {index} is {}, should be {}: {excess:.1} times the tolerance",
            f32::from_bits(words[index]),
            reference[index]
        );
        self.num_comparisons += 1;
    }

    /// Asserts that two runs gave the same bits.
    pub fn same_bits(&mut self, label: &str, first: &Output, second: &Output) {
        let (first, second) = (self.words(label, first), self.words(label, second));
        assert_eq!(first, second, "{label}: bits differ");
        self.num_comparisons += 1;
    }
}
