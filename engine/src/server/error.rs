//! Every refusal as an HTTP status and OpenAI's error object.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use protocol::openai::{ErrorBody, ErrorObject, ErrorType, FieldError};

use crate::event::RequestError;

/// Seconds after which a refused client may try again.
const RETRY_AFTER_S: &str = "1";

/// An answer that is not a success.
#[derive(Clone, Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    object: ErrorObject,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let r#type = match status {
            StatusCode::TOO_MANY_REQUESTS => ErrorType::RateLimitError,
            status if status.is_server_error() => ErrorType::ServerError,
            _ => ErrorType::InvalidRequestError,
        };
        Self { status, object: ErrorObject { message: message.into(), r#type, param: None, code: None } }
    }

    fn with(mut self, param: Option<&str>, code: Option<&str>) -> Self {
        self.object.param = param.map(str::to_owned);
        self.object.code = code.map(str::to_owned);
        self
    }

    pub(super) fn unavailable(message: &str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    pub(super) fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message).with(None, Some("invalid_api_key"))
    }

    pub(super) fn bad_request(message: impl Into<String>, param: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message).with(Some(param), None)
    }

    pub(super) fn too_long(message: String, param: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message).with(Some(param), Some("context_length_exceeded"))
    }

    pub(super) fn model_not_found(asked: &str, served: &[String]) -> Self {
        let message = format!("the model `{asked}` does not exist; served here: {}", served.join(", "));
        Self::new(StatusCode::NOT_FOUND, message).with(Some("model"), Some("model_not_found"))
    }

    pub(super) fn bad_json(error: &serde_json::Error) -> Self {
        Self::new(StatusCode::BAD_REQUEST, format!("the body is not valid JSON: {error}"))
            .with(None, Some("invalid_json"))
    }

    pub(super) fn body_too_large(limit: usize) -> Self {
        let message = format!("the request body is over the limit of {limit} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, message).with(None, Some("body_too_large"))
    }

    pub(super) fn slow_body(limit: Duration) -> Self {
        let message = format!("the request body did not come within {} s", limit.as_secs());
        Self::new(StatusCode::REQUEST_TIMEOUT, message).with(None, Some("slow_body"))
    }

    /// A body that could not be read: the connection broke.
    pub(super) fn body(error: &axum::Error) -> Self {
        Self::new(StatusCode::BAD_REQUEST, format!("the request body could not be read: {error}"))
    }

    /// The error object, for an event of a stream that has begun.
    pub(super) fn body_json(&self) -> ErrorBody {
        ErrorBody { error: self.object.clone() }
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> Self {
        Self::bad_request(error.to_string(), &error.param)
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let message = error.to_string();
        match error {
            RequestError::EmptyPrompt => Self::bad_request(message, "prompt"),
            RequestError::TooLong { .. } | RequestError::NeverFits { .. } => Self::too_long(message, "max_tokens"),
            RequestError::UnknownToken { param, .. } => Self::bad_request(message, param),
            RequestError::QueueFull { .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, message).with(None, Some("queue_full"))
            }
            RequestError::TooManyAnswers { .. } => Self::bad_request(message, "n"),
            RequestError::Loading | RequestError::Refused => Self::unavailable(&message),
            RequestError::DeadlineExceeded { .. } => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, message).with(Some("timeout"), Some("deadline_exceeded"))
            }
            RequestError::NotANumber | RequestError::EngineFailed(_) => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body_json())).into_response();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_S));
        }
        response
    }
}
