//! Reading a request's JSON: within a limit a body, a limit on all bodies together, and a time.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use futures_util::StreamExt;
use protocol::openai::FieldError;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Server;
use super::error::ApiError;

/// From the end of the headers to the end of the body. A client that sends slower than that holds a place that others want.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// A body up to here needs no share of the memory for large ones: connections bound how many there are.
const SMALL_BYTES: usize = 64 << 10;
/// For so long a large body waits for its share.
const SHARE_TIMEOUT: Duration = Duration::from_secs(5);

/// A request's JSON and its share of the memory for all of them.
pub(super) struct JsonBody {
    value: Value,
    _share: Option<OwnedSemaphorePermit>,
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
        let limit = self.config.max_body_bytes;
        // A body that does not tell its length may be as long as any.
        let len = body.size_hint().exact().map_or(limit, |len| usize::try_from(len).unwrap_or(usize::MAX));
        if len > limit {
            return Err(ApiError::body_too_large(limit));
        }
        // All at once, so that no two bodies wait for what the other holds.
        let share = if len > SMALL_BYTES { Some(self.body_share(len).await?) } else { None };
        let read = tokio::time::timeout(BODY_TIMEOUT, read(body, len));
        let bytes = read.await.map_err(|_| ApiError::slow_body(BODY_TIMEOUT))??;
        let value = serde_json::from_slice(&bytes).map_err(|error| ApiError::bad_json(&error))?;
        Ok(JsonBody { value, _share: share })
    }

    /// The request that a body holds, from a server that takes requests.
    pub(super) async fn parsed<T>(
        &self,
        body: Body,
        parse: impl Fn(&Value) -> Result<T, FieldError>,
    ) -> Result<T, ApiError> {
        self.check_serving()?;
        Ok(parse(&self.json(body).await?.value)?)
    }

    async fn body_share(&self, len: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let wanted = u32::try_from(len).unwrap_or(u32::MAX);
        let share = tokio::time::timeout(SHARE_TIMEOUT, Arc::clone(&self.body_bytes).acquire_many_owned(wanted));
        let busy = || ApiError::unavailable("too many large request bodies at once; try again later");
        share.await.map_err(|_| busy())?.map_err(|_| busy())
    }
}

/// Reads a body of at most `limit` bytes.
async fn read(body: Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    let mut chunks = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| ApiError::body(&error))?;
        if bytes.len() + chunk.len() > limit {
            return Err(ApiError::body_too_large(limit));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}
