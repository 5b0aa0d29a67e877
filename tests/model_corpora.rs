//! The fuzz targets' checks of what reads models over their corpora: what once was found stays found, without a nightly
//! compiler.

#[path = "../fuzz/checks/chat_template.rs"]
mod chat_template;
#[path = "../fuzz/checks/gguf_header.rs"]
mod gguf_header;
#[path = "../fuzz/checks/safetensors_header.rs"]
mod safetensors_header;

use std::path::Path;

/// Every file of a corpus, and the same with each part of it cut off and each of some bits flipped.
fn over(corpus: &str, variations: usize, check: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(corpus);
    let mut num_files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        check(&bytes);
        for variation in 0..variations {
            let at = bytes.len() * variation / variations;
            check(&bytes[..at]);
            let mut flipped = bytes.clone();
            if let Some(byte) = flipped.get_mut(at) {
                *byte ^= 1 << (variation % 8);
            }
            check(&flipped);
        }
        num_files += 1;
    }
    assert!(num_files > 0, "the corpus of {corpus} is empty");
}

#[test]
fn gguf_headers() {
    over("gguf_header", 1500, gguf_header::check);
}

#[test]
fn safetensors_headers() {
    over("safetensors_header", 400, safetensors_header::check);
}

#[test]
fn chat_templates() {
    over("chat_template", 250, chat_template::check);
}
