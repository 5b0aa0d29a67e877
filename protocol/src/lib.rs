//! What Pagoda's processes and their clients say to each other. A leaf crate: types and pure functions, no I/O.
//!
//! Used by the engine's HTTP edge and the binary. `openai` is the public API; the cluster's own types (block names, KV
//! frames, worker reports) come to live beside it.

pub mod openai;
