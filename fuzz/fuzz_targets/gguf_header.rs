//! A GGUF file of any bytes: refused with a reason, or opened and read into what an engine starts from, without a crash.
#![no_main]

#[path = "../checks/gguf_header.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check::check(bytes));
