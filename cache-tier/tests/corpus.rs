//! The fuzz targets' checks over their corpora: what once was found stays found, without a nightly compiler.

#[path = "../../fuzz/checks/kv_header.rs"]
mod kv_header;
#[path = "../../fuzz/checks/kv_segment.rs"]
mod kv_segment;
#[path = "../../fuzz/checks/kv_stream.rs"]
mod kv_stream;

use std::path::Path;

/// Every file of a corpus, and the same with each part of it cut off and each of some bits flipped.
fn over(corpus: &str, variations: usize, check: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(corpus);
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
fn headers() {
    over("kv_header", 500, kv_header::check);
}

#[test]
fn streams() {
    over("kv_stream", 200, kv_stream::check);
}

#[test]
fn segments() {
    over("kv_segment", 60, kv_segment::check);
}
