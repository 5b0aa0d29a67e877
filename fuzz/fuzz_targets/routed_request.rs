//! A request's body from any bytes: where the engine takes it, the router reads the same content in it.
#![no_main]

#[path = "../checks/routed_request.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check::check(bytes));
