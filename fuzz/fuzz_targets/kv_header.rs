//! A frame's header from any bytes: refused or understood, and written again as it was read.
#![no_main]

#[path = "../checks/kv_header.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check::check(bytes));
