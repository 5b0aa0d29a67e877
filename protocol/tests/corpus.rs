//! The fuzz targets' checks over their corpora: what once was found stays found, without a nightly compiler.

#[path = "../../fuzz/checks/routed_request.rs"]
mod routed_request;
#[path = "../../fuzz/checks/worker_events.rs"]
mod worker_events;

use std::path::Path;

/// Every file of a corpus, and the same with each part of it cut off and each of some bits flipped.
fn over(corpus: &str, check: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(corpus);
    let mut num_files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        check(&bytes);
        for at in 0..bytes.len() {
            check(&bytes[..at]);
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            check(&flipped);
        }
        num_files += 1;
    }
    assert!(num_files > 0, "the corpus of {corpus} is empty");
}

#[test]
fn requests() {
    over("routed_request", routed_request::check);
}

#[test]
fn events() {
    over("worker_events", worker_events::check);
}
