//! What a router refuses, as OpenAI's error object.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use protocol::openai::{ErrorBody, ErrorObject, ErrorType};

/// Why a request is not answered by a worker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// The body is no request.
    #[error("the body is not a valid request: {0}")]
    BadBody(String),
    /// The body is too large.
    #[error("the request body is over the limit of {0} bytes")]
    BodyTooLarge(usize),
    /// The body did not come.
    #[error("the request body could not be read: {0}")]
    BodyBroken(String),
    /// No key, or an unknown one.
    #[error("this server wants an API key: Authorization: Bearer KEY")]
    NoKey,
    /// No worker serves it.
    #[error("the model `{asked}` does not exist; served here: {served}")]
    UnknownModel {
        /// By the request.
        asked: String,
        /// By the workers.
        served: String,
    },
    /// All workers of the model are away.
    #[error("no worker takes requests of `{model}` now: {why}")]
    NoWorker {
        /// Asked for.
        model: String,
        /// Each worker and its reason.
        why: String,
    },
    /// Workers were tried and failed.
    #[error("{tries} workers were tried and failed; the last, {worker}: {error}")]
    AllFailed {
        /// How many.
        tries: usize,
        /// The last.
        worker: String,
        /// Why.
        error: String,
    },
}

impl RouteError {
    fn status(&self) -> StatusCode {
        match self {
            Self::BadBody(_) | Self::BodyBroken(_) => StatusCode::BAD_REQUEST,
            Self::BodyTooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NoKey => StatusCode::UNAUTHORIZED,
            Self::UnknownModel { .. } => StatusCode::NOT_FOUND,
            Self::NoWorker { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::AllFailed { .. } => StatusCode::BAD_GATEWAY,
        }
    }

    /// The error object.
    pub fn body(&self) -> ErrorBody {
        let (param, code) = match self {
            Self::UnknownModel { .. } => (Some("model"), Some("model_not_found")),
            Self::NoKey => (None, Some("invalid_api_key")),
            Self::BodyTooLarge(_) => (None, Some("body_too_large")),
            Self::BadBody(_) | Self::BodyBroken(_) => (None, Some("invalid_json")),
            Self::NoWorker { .. } => (None, Some("no_worker")),
            Self::AllFailed { .. } => (None, Some("workers_failed")),
        };
        let r#type =
            if self.status().is_server_error() { ErrorType::ServerError } else { ErrorType::InvalidRequestError };
        let (param, code) = (param.map(str::to_owned), code.map(str::to_owned));
        ErrorBody { error: ErrorObject { message: self.to_string(), r#type, param, code } }
    }
}

impl IntoResponse for RouteError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        if self.status() == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
