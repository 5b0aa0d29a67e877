//! OpenAI's error object.

use serde::Serialize;

/// OpenAI's `type` of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorType {
    /// The client's mistake.
    InvalidRequestError,
    /// Too much at once.
    RateLimitError,
    /// Ours.
    ServerError,
}

/// `{"error": ...}`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorBody {
    /// The object.
    pub error: ErrorObject,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorObject {
    /// For people.
    pub message: String,
    /// The kind.
    pub r#type: ErrorType,
    /// The parameter at fault.
    pub param: Option<String>,
    /// For programs.
    pub code: Option<String>,
}
