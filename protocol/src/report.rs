//! What an engine tells of itself: `GET /internal/v1/report`, a JSON object.
//!
//! Written by the engine's server, read by the router. Rates and loads are measured, not configured.

use serde::{Deserialize, Serialize};

use crate::version::{VersionError, WireVersion};

/// This release's version of the report.
pub const VERSION: u32 = 1;
/// The oldest release that can read it.
pub const READABLE_BY: u32 = 1;

/// Which phases a worker serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prompts only.
    Prefill,
    /// Answers only.
    Decode,
    /// Both.
    #[default]
    Both,
}

/// Requests and blocks in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Load {
    pub num_running: usize,
    pub num_waiting: usize,
    /// Prompt tokens of waiting and running requests that are not computed yet.
    pub num_uncomputed_tokens: usize,
    pub num_used_blocks: usize,
    pub draining: bool,
}

/// What there is to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Capacity {
    pub num_blocks: usize,
    /// Tokens a block.
    pub block_size: usize,
    pub max_num_seqs: usize,
    pub max_model_len: usize,
    /// Requests that may wait.
    pub max_queue: usize,
}

/// Measured speeds; 0 until measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rates {
    /// Prompt tokens a second.
    pub prefill_tokens_per_s: f64,
    /// Seconds of a step that only decodes.
    pub decode_step_s: f64,
    /// Bytes of text a prompt token stands for.
    pub bytes_per_token: f64,
}

/// One engine, now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// Of this object.
    #[serde(flatten)]
    pub wire: WireVersion,
    /// Names that it serves the model under.
    pub models: Vec<String>,
    /// Hex; empty until loaded.
    #[serde(default)]
    pub fingerprint: String,
    /// `vulkan:0 (...)`, `cpu`, `sim:...`.
    #[serde(default)]
    pub device: String,
    /// Phases.
    #[serde(default)]
    pub role: Role,
    /// Another at each start: what was known of an earlier epoch is void.
    pub epoch: u64,
    /// Whether it takes requests.
    pub ready: bool,
    /// In use.
    #[serde(default)]
    pub load: Load,
    /// In all.
    #[serde(default)]
    pub capacity: Capacity,
    /// Measured.
    #[serde(default)]
    pub rates: Rates,
}

/// A report that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// Not the JSON of a report.
    #[error("the worker report is malformed: {0}")]
    Malformed(#[from] serde_json::Error),
    /// Of a release that is too new.
    #[error(transparent)]
    Version(#[from] VersionError),
}

impl WorkerReport {
    /// What this release writes.
    pub const WIRE: WireVersion = WireVersion { version: VERSION, readable_by: READABLE_BY };

    /// Reads a report of any release that this one understands.
    ///
    /// # Errors
    /// When it is no report, or of a release that is too new.
    pub fn parse(json: &[u8]) -> Result<Self, ReportError> {
        // The version first: the fields of a version that is refused need not parse.
        let wire: WireVersion = serde_json::from_slice(json)?;
        wire.check("the worker report", VERSION)?;
        Ok(serde_json::from_slice(json)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report() -> WorkerReport {
        WorkerReport {
            wire: WorkerReport::WIRE,
            models: vec!["m".into()],
            fingerprint: "00".into(),
            device: "cpu".into(),
            role: Role::Both,
            epoch: 7,
            ready: true,
            load: Load { num_running: 2, ..Default::default() },
            capacity: Capacity { num_blocks: 10, block_size: 16, ..Default::default() },
            rates: Rates::default(),
        }
    }

    #[test]
    fn it_reads_what_it_writes() {
        let json = serde_json::to_vec(&report()).unwrap();
        assert_eq!(WorkerReport::parse(&json).unwrap(), report());
    }

    #[test]
    fn two_releases_mix_in_a_rolling_upgrade() {
        // The next release adds fields, at the top and within, and says that this one can read it.
        let mut newer = serde_json::to_value(report()).unwrap();
        newer["version"] = json!(VERSION + 1);
        newer["temperature_c"] = json!(71);
        newer["load"]["num_paused"] = json!(3);
        assert_eq!(WorkerReport::parse(newer.to_string().as_bytes()).unwrap().load, report().load);
        // An earlier one lacks what was added since.
        let older = json!({ "version": 1, "readable_by": 1, "models": ["m"], "epoch": 7, "ready": false });
        let older = WorkerReport::parse(older.to_string().as_bytes()).unwrap();
        assert_eq!((older.role, older.capacity.num_blocks), (Role::Both, 0));
    }

    #[test]
    fn a_version_that_cannot_be_read_is_refused_with_both_numbers() {
        let error = WorkerReport::parse(br#"{"version": 9, "readable_by": 8, "models": 3}"#).unwrap_err().to_string();
        assert!(
            error.contains("version 9") && error.contains("from version 8") && error.contains("version 1"),
            "{error}"
        );
        assert!(WorkerReport::parse(b"[]").is_err() && WorkerReport::parse(br#"{"version": 1}"#).is_err());
    }
}
