//! Reading a request's JSON: within a limit a body, a limit on all bodies together, and a time.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use futures_util::StreamExt;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Server;
use super::error::ApiError;

/// From the end of the headers to the end of the body. A client that sends slower than that holds a place that others want.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// A request's JSON and its share of the memory for all of them.
pub(super) struct JsonBody {
    value: Value,
    _bytes: Option<OwnedSemaphorePermit>,
}

impl Deref for JsonBody {
    type Target = Value;

    fn deref(&self) -> &Value {
        &self.value
    }
}

/// Bytes of all bodies at once: four of the largest. Parsed, a body of short numbers takes some thirty times its size.
pub(super) fn bytes_at_once(max_body_bytes: usize) -> usize {
    max_body_bytes.saturating_mul(4).clamp(1 << 20, Semaphore::MAX_PERMITS)
}

impl Server {
    /// Reads a JSON body.
    pub(super) async fn json(&self, body: Body) -> Result<JsonBody, ApiError> {
        match tokio::time::timeout(BODY_TIMEOUT, self.read(body)).await {
            Ok(read) => read,
            Err(_) => Err(ApiError::slow_body(BODY_TIMEOUT)),
        }
    }

    async fn read(&self, body: Body) -> Result<JsonBody, ApiError> {
        let limit = self.config.max_body_bytes;
        let mut chunks = body.into_data_stream();
        let (mut bytes, mut permits): (Vec<u8>, Option<OwnedSemaphorePermit>) = (Vec::new(), None);
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|error| ApiError::body(&error))?;
            if bytes.len() + chunk.len() > limit {
                return Err(ApiError::body_too_large(limit));
            }
            let wanted = u32::try_from(chunk.len()).unwrap_or(u32::MAX);
            let permit = Arc::clone(&self.body_bytes).acquire_many_owned(wanted).await;
            let permit = permit.map_err(|_| ApiError::unavailable("the server is shutting down"))?;
            match &mut permits {
                Some(permits) => permits.merge(permit),
                None => permits = Some(permit),
            }
            bytes.extend_from_slice(&chunk);
        }
        let value = serde_json::from_slice(&bytes).map_err(|error| ApiError::bad_json(&error))?;
        Ok(JsonBody { value, _bytes: permits })
    }
}
