//! The tiers below the device: KV blocks in host memory, on disk and behind the network, under one trait.
//!
//! Used by the engine, which puts blocks down and takes them up, and by `pagoda cache`, which serves a store to many
//! engines. A block on its way: `tiered` (which places, by `policy`) → `host` (bytes in memory) → `disk` (segments, mapped)
//! → `remote` (`/kv/v1` of another process, whose other end is `http`). Invariant: losing any of it costs time, never a
//! wrong token: whoever takes a block up compares its whole identity and its checksum.

pub mod disk;
pub mod eviction;
pub mod ghost;
pub mod host;
pub mod http;
pub mod metrics;
pub mod policy;
pub mod remote;
pub mod store;
pub mod tiered;

pub use disk::{DiskConfig, DiskError, DiskStore};
pub use host::HostStore;
pub use policy::Place;
pub use store::{PlaceStats, Store};
pub use tiered::TieredStore;
