//! The fuzz targets' checks of what reads models over their corpora: what once was found stays found, without a nightly
//! compiler.

#[path = "../fuzz/checks/chat_template.rs"]
mod chat_template;
#[path = "../fuzz/checks/gguf_header.rs"]
mod gguf_header;
#[path = "../fuzz/checks/over.rs"]
mod over;
#[path = "../fuzz/checks/safetensors_header.rs"]
mod safetensors_header;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn gguf_headers() {
    over::over(ROOT, "gguf_header", 1500, gguf_header::check);
}

#[test]
fn safetensors_headers() {
    over::over(ROOT, "safetensors_header", 400, safetensors_header::check);
}

#[test]
fn chat_templates() {
    over::over(ROOT, "chat_template", 250, chat_template::check);
}
