//! A chat template of any text: refused with a reason, or rendered within its steps, without a crash.
#![no_main]

#[path = "../checks/chat_template.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check::check(bytes));
