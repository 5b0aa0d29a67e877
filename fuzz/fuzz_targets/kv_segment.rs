//! A segment file of any bytes: skipped, or opened and read without a crash and without a block that is not whole.
#![no_main]

#[path = "../checks/kv_segment.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check::check(bytes));
