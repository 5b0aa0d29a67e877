//! A stream of worker events from any bytes: the same whatever the pieces.
#![no_main]

#[path = "../checks/worker_events.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check::check(bytes));
