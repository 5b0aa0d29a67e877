//! What Pagoda's processes and their clients say to each other. A leaf crate: types and pure functions, no I/O.
//!
//! Used by the engine and the binary. `openai` is the public API; `block_hash` and `fingerprint` name KV state, the same
//! on every machine; `report` is what an engine tells of itself; `version` is the rule for everything that two processes
//! of different releases exchange.

pub mod block_hash;
pub mod fingerprint;
pub mod openai;
pub mod report;
pub mod version;

pub use block_hash::{BlockHash, BlockKey, Salt};
pub use fingerprint::ModelFingerprint;
pub use report::WorkerReport;
pub use version::{VersionError, WireVersion};
