//! The crate's errors by audience: loading a model, and running it.

use std::path::PathBuf;

use crate::model_file::ModelFileError;
use crate::ops::DeviceError;

/// Why an engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file is malformed or unsupported.
    #[error(transparent)]
    Gguf(#[from] ModelFileError),
    /// The device refused something that is not a tensor.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device refused a tensor.
    #[error("tensor `{name}`: {source}")]
    Tensor {
        /// The tensor.
        name: String,
        /// The device's reason.
        source: DeviceError,
    },
    /// The file's tokeniser cannot be built.
    #[error("{path}: tokeniser: {reason}")]
    Tokenizer {
        /// The model file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The file's chat template cannot be parsed.
    #[error("{path}: chat template: {reason}")]
    ChatTemplate {
        /// The model file.
        path: PathBuf,
        /// The line and what is wrong with it.
        reason: String,
    },
    /// No such device.
    #[error("device `{name}` {reason}; there are: {available}")]
    NoDevice {
        /// What was asked for.
        name: String,
        /// Why it cannot be taken.
        reason: String,
        /// The names that can.
        available: String,
    },
    /// A setting does not fit the model or the device.
    #[error("{0}")]
    Setting(String),
}
