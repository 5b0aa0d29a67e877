//! Every kernel on the software GPU against its f64 reference: edge shapes, poison, sentinel, guard, repeatability.
//!
//! One device a process (burn's registration), so one test function runs all kernels' checks in turn and names the one
//! that failed. A missing adapter is a counted skip, and a failure under `REQUIRE_GPU=1`.

#[path = "../support/mod.rs"]
mod support;

mod act_and_mul;
mod add_bias;
mod adjust_logits;
mod argmax;
mod embedding;
mod gather_blocks;
mod gather_rows;
mod harness;
mod matmul;
mod matmul_int8;
mod matmul_tiled;
mod paged_attention_decode;
mod paged_attention_prefill;
mod paged_attention_reduce;
mod quantize_activations;
mod rms_norm;
mod rotate_and_cache;
mod sample;
mod scatter_blocks;
mod soft_cap;
mod token_logprobs;
mod top_k;

use harness::Harness;

/// A kernel's stem and its checks.
type KernelTest = (&'static str, fn(&mut Harness));

const TESTS: [KernelTest; 21] = [
    ("act_and_mul", act_and_mul::test),
    ("add_bias", add_bias::test),
    ("adjust_logits", adjust_logits::test),
    ("argmax", argmax::test),
    ("embedding", embedding::test),
    ("gather_blocks", gather_blocks::test),
    ("gather_rows", gather_rows::test),
    ("matmul", matmul::test),
    ("matmul_int8", matmul_int8::test),
    ("matmul_tiled", matmul_tiled::test),
    ("paged_attention_decode", paged_attention_decode::test),
    ("paged_attention_prefill", paged_attention_prefill::test),
    ("paged_attention_reduce", paged_attention_reduce::test),
    ("quantize_activations", quantize_activations::test),
    ("rms_norm", rms_norm::test),
    ("rotate_and_cache", rotate_and_cache::test),
    ("sample", sample::test),
    ("scatter_blocks", scatter_blocks::test),
    ("soft_cap", soft_cap::test),
    ("token_logprobs", token_logprobs::test),
    ("top_k", top_k::test),
];

#[test]
fn every_kernel_matches_its_reference() {
    let Some(gpu) = support::gpu() else { return };
    let mut stems: Vec<&str> = shaders::CATALOGUE.iter().map(|shader| shader.name).collect();
    stems.sort_unstable();
    assert_eq!(stems, TESTS.map(|(stem, _)| stem), "a kernel without a test, or a test without a kernel");
    let mut harness = Harness::new(gpu);
    let mut failed: Vec<&str> = Vec::new();
    // Most tests run the first plan: hardware's, then this device's own. Those of matrices run all plans at once.
    for (pass, name) in ["hardware's plan", "this device's plan"].into_iter().enumerate() {
        for (stem, test) in TESTS.iter().filter(|(stem, _)| pass == 0 || !stem.starts_with("matmul")) {
            println!("{stem}, {name}");
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&mut harness))).is_err() {
                failed.push(stem);
            }
        }
        harness.plans.rotate_right(1);
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
    println!("{} comparisons", harness.num_comparisons);
    assert!(harness.num_comparisons > 150, "only {} comparisons ran", harness.num_comparisons);
}
