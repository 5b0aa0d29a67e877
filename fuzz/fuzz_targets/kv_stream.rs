//! A body of `/kv/v1` from any bytes: the same whatever the pieces, and nothing that is not in it.
#![no_main]

#[path = "../checks/kv_stream.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check::check(bytes));
