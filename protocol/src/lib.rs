//! What Pagoda's processes and their clients say to each other. A leaf crate: types and pure functions, no I/O.
//!
//! Used by the engine, the cache tier and the binary. `openai` is the public API; `block_hash` and `fingerprint` name KV
//! state, the same on every machine; `kv_frame`, `codec`, `kv_wire` and `buffers` are how it travels; `report` is what an engine tells of itself; `version` is the rule for everything that two processes
//! of different releases exchange.

pub mod block_hash;
pub mod buffers;
pub mod codec;
pub mod fingerprint;
pub mod handover;
pub mod kv_frame;
pub mod kv_wire;
pub mod openai;
pub mod prompt_chain;
pub mod report;
pub mod version;
pub mod worker_event;

pub use block_hash::{BlockHash, BlockKey, Salt};
pub use buffers::Buffers;
pub use codec::Codec;
pub use fingerprint::ModelFingerprint;
pub use handover::Handover;
pub use kv_frame::{BlockIdentity, KvFrame, NumericsClass};
pub use kv_wire::{Lookup, Prefix, PutOutcome, PutReason};
pub use prompt_chain::PromptChain;
pub use report::WorkerReport;
pub use version::{VersionError, WireVersion};
pub use worker_event::{HeldChunk, WorkerEvent};
