//! The fuzz targets' checks over their corpora: what once was found stays found, without a nightly compiler.

#[path = "../../fuzz/checks/over.rs"]
mod over;
#[path = "../../fuzz/checks/routed_request.rs"]
mod routed_request;
#[path = "../../fuzz/checks/worker_events.rs"]
mod worker_events;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

#[test]
fn requests() {
    over::over(ROOT, "routed_request", usize::MAX, routed_request::check);
}

#[test]
fn events() {
    over::over(ROOT, "worker_events", usize::MAX, worker_events::check);
}
