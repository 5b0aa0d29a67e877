//! Weights of any bytes in a Hugging Face directory: refused with a reason, or opened and read, without a crash.
#![no_main]

#[path = "../checks/safetensors_header.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check::check(bytes));
