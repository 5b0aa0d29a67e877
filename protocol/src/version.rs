//! The rule for whatever two processes of different releases exchange.
//!
//! A writer states its version and the oldest version that can still read what it wrote. A reader ignores fields that it
//! does not know, and refuses only what its own version cannot read. So a rolling upgrade may mix two releases: an
//! addition raises `version` alone, a change of meaning raises `readable_by` as well.

use serde::{Deserialize, Serialize};

/// What a writer states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireVersion {
    /// The writer's version of the format.
    pub version: u32,
    /// The oldest version that can read it.
    pub readable_by: u32,
}

/// A message that this release cannot read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} has version {version}, which readers from version {readable_by} on understand; this one has version {ours}: upgrade it"
)]
pub struct VersionError {
    what: &'static str,
    version: u32,
    readable_by: u32,
    ours: u32,
}

impl WireVersion {
    /// Whether a reader of version `ours` understands it.
    ///
    /// # Errors
    /// When it does not, with both versions.
    pub fn check(&self, what: &'static str, ours: u32) -> Result<(), VersionError> {
        if self.readable_by <= ours {
            return Ok(());
        }
        let Self { version, readable_by } = *self;
        Err(VersionError { what, version, readable_by, ours })
    }
}
