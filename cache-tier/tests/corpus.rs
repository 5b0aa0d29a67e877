//! The fuzz targets' checks over their corpora: what once was found stays found, without a nightly compiler.

#[path = "../../fuzz/checks/kv_header.rs"]
mod kv_header;
#[path = "../../fuzz/checks/kv_segment.rs"]
mod kv_segment;
#[path = "../../fuzz/checks/kv_stream.rs"]
mod kv_stream;
#[path = "../../fuzz/checks/over.rs"]
mod over;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

#[test]
fn headers() {
    over::over(ROOT, "kv_header", 500, kv_header::check);
}

#[test]
fn streams() {
    over::over(ROOT, "kv_stream", 200, kv_stream::check);
}

#[test]
fn segments() {
    over::over(ROOT, "kv_segment", 60, kv_segment::check);
}
