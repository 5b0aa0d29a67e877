//! One try of a request at one worker: the request is sent, its answer read event by event, or whole.
//!
//! Made by dispatch, and by the relay where a stream goes on elsewhere. Invariant: dropping a leg cancels its request at the
//! worker; its connection is used again only after an answer that was read to its end.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use protocol::handover::{USED_HEADER, Used, with_field};

use crate::asked::{Asked, REQUEST_ID};
use crate::worker::connection::{Kept, UpstreamError};
use crate::worker::{InFlight, Kind, Worker};

/// How often a silent worker is looked at.
const LOOK: Duration = Duration::from_millis(250);
/// A worker that nobody has heard of for so long is asked whether it lives.
const GONE_AFTER: Duration = Duration::from_secs(2);
/// A worker that lives says so by then.
const ALIVE_WITHIN: Duration = Duration::from_secs(1);
/// Of an event, or a whole answer.
const MAX_BYTES: usize = 64 << 20;

/// Why a try failed.
#[derive(Debug, thiserror::Error)]
pub enum LegError {
    /// It could not be sent, or no head came.
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
    /// The answer broke off.
    #[error("the answer broke off: {0}")]
    Broken(String),
    /// Nothing was heard of the worker.
    #[error("it says nothing")]
    Silent,
    /// The engine says that it failed.
    #[error("the engine failed: {0}")]
    Failed(String),
    /// It goes away, and leaves the stream to others.
    #[error("it hands its streams over")]
    HandOff,
    /// It does not take the request.
    #[error("answered with {0}")]
    Status(StatusCode),
}

impl LegError {
    /// As in metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Upstream(UpstreamError::Connect { .. }) => "connect",
            Self::Upstream(UpstreamError::Timeout(_)) => "timeout",
            Self::Upstream(UpstreamError::Broken(_)) | Self::Broken(_) => "broken",
            Self::Silent => "silent",
            Self::Failed(_) => "failed",
            Self::HandOff => "hand-off",
            Self::Status(_) => "status",
        }
    }

    /// Whether it speaks against the worker. One that is busy, or goes away in order, has done nothing wrong; nor has one that
    /// refuses what a client wants.
    pub fn is_fault(&self) -> bool {
        match self {
            Self::HandOff => false,
            Self::Status(status) => !is_busy(*status) && !is_final(*status),
            _ => true,
        }
    }
}

/// Whether another worker may have time.
pub fn is_busy(status: StatusCode) -> bool {
    matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS)
}

/// Whether every worker would say the same: the request is wrong, or the time that the client gave it is over.
pub fn is_final(status: StatusCode) -> bool {
    (status.is_client_error() && !is_busy(status)) || status == StatusCode::GATEWAY_TIMEOUT
}

/// A try whose head has come.
pub struct Leg {
    /// Where.
    pub in_flight: InFlight,
    /// Status and headers.
    pub head: Response<()>,
    body: Incoming,
    connection: Option<Kept>,
    buffer: BytesMut,
    /// What of the buffer has been looked at for the end of an event.
    searched: usize,
}

impl Leg {
    /// Sends a request to a worker and waits for the head of the answer.
    ///
    /// # Errors
    /// When it does not come.
    pub async fn open(
        asked: &Asked,
        worker: &Arc<Worker>,
        uncached: f64,
        limit: Option<Duration>,
    ) -> Result<Self, LegError> {
        let in_flight = worker.begin(uncached);
        let request = request(asked, worker);
        let sent = while_alive(worker, worker.upstream.send(request));
        let answer = match limit {
            Some(limit) => tokio::time::timeout(limit, sent).await.map_err(|_| UpstreamError::Timeout(limit))?,
            None => sent.await,
        };
        let (response, connection) = answer??.into_parts();
        let (head, body) = response.into_parts();
        let head = Response::from_parts(head, ());
        Ok(Self { in_flight, head, body, connection: Some(connection), buffer: BytesMut::new(), searched: 0 })
    }

    /// The worker.
    pub fn worker(&self) -> &Arc<Worker> {
        self.in_flight.worker()
    }

    /// Whether it tells what its events deliver.
    pub fn tells(&self) -> bool {
        self.worker().tells()
    }

    /// Whether it is a stream of events.
    pub fn is_stream(&self) -> bool {
        let kind = self.head.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        self.head.status() == StatusCode::OK && kind.is_some_and(|kind| kind.starts_with("text/event-stream"))
    }

    /// What the answer used, where its head tells.
    pub fn used(&self) -> Option<Used> {
        Used::parse(self.head.headers().get(USED_HEADER)?.to_str().ok()?)
    }

    /// The whole body.
    ///
    /// # Errors
    /// When it breaks off.
    pub async fn whole(mut self) -> Result<(Bytes, InFlight), LegError> {
        let worker = Arc::clone(self.worker());
        let body = Limited::new(self.body, MAX_BYTES).collect();
        let body = while_alive(&worker, body).await?.map_err(|error| LegError::Broken(error.to_string()))?;
        if let Some(connection) = self.connection.take() {
            connection.give_back();
        }
        Ok((body.to_bytes(), self.in_flight))
    }

    /// The next event with its empty line; `None` at the end. Comments that only keep the connection alive do not move the
    /// time by which it has to come.
    ///
    /// # Errors
    /// When the stream breaks, the worker is gone, or `until` is over.
    pub async fn next_event(&mut self, until: Instant) -> Result<Option<Bytes>, LegError> {
        let worker = Arc::clone(self.worker());
        loop {
            if let Some(event) = self.buffered() {
                return Ok(Some(event));
            }
            if self.buffer.len() > MAX_BYTES {
                return Err(LegError::Broken(format!("an event of more than {MAX_BYTES} bytes")));
            }
            let frame = tokio::time::timeout_at(until, while_alive(&worker, self.body.frame())).await;
            match frame.map_err(|_| LegError::Silent)?? {
                // What is left over is no whole event: nobody knows what it would have delivered.
                None => return Ok(None),
                Some(frame) => {
                    let frame = frame.map_err(|error| LegError::Broken(error.to_string()))?;
                    self.buffer.extend_from_slice(frame.data_ref().map_or(&[], |data| data));
                }
            }
        }
    }

    /// An event that has come already.
    pub fn buffered(&mut self) -> Option<Bytes> {
        // The end may lie across what was there and what came.
        let from = self.searched.saturating_sub(3);
        let Some(end) = end_of_event(&self.buffer[from..]) else {
            self.searched = self.buffer.len();
            return None;
        };
        self.searched = 0;
        Some(self.buffer.split_to(from + end).freeze())
    }

    /// The stream was read to where it says that it ends: its connection may be used again.
    pub async fn finish(mut self) {
        let at_end = tokio::time::timeout(LOOK, self.body.frame()).await;
        if let (Ok(None), Some(connection)) = (at_end, self.connection.take()) {
            connection.give_back();
        }
    }
}

/// Where an event ends, behind its empty line: lines end with LF, or with CR and LF.
fn end_of_event(bytes: &[u8]) -> Option<usize> {
    let mut newlines = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at);
    newlines.find_map(|at| match &bytes[at + 1..] {
        [b'\n', ..] => Some(at + 2),
        [b'\r', b'\n', ..] => Some(at + 3),
        _ => None,
    })
}

/// Waits for something that a worker does, as long as the worker lives. One that is not heard of any more is asked for its
/// health: that only its events stopped is no reason to give up what it is doing.
async fn while_alive<T>(worker: &Worker, work: impl Future<Output = T>) -> Result<T, LegError> {
    let mut work = std::pin::pin!(work);
    let mut lost_since = None;
    loop {
        if let Ok(done) = tokio::time::timeout(LOOK, &mut work).await {
            return Ok(done);
        }
        if worker.is_fresh() {
            lost_since = None;
        } else if lost_since.get_or_insert_with(Instant::now).elapsed() > GONE_AFTER {
            tokio::select! {
                done = &mut work => return Ok(done),
                alive = is_alive(worker) => if !alive {
                    return Err(LegError::Silent);
                },
            }
            lost_since = None;
        }
    }
}

/// Whether a worker answers at all.
async fn is_alive(worker: &Worker) -> bool {
    let mut request = Request::new(Full::default());
    *request.uri_mut() = hyper::Uri::from_static("/health");
    if let Ok(host) = HeaderValue::try_from(worker.upstream.address()) {
        request.headers_mut().insert(HOST, host);
    }
    matches!(tokio::time::timeout(ALIVE_WITHIN, worker.upstream.send(request)).await, Ok(Ok(_)))
}

fn request(asked: &Asked, worker: &Worker) -> Request<Full<Bytes>> {
    let (path, body) = match worker.config.kind {
        Kind::Pagoda if asked.endpoint.generates() => {
            (asked.endpoint.internal_path(), asked.handover.added_to(&asked.body).into())
        }
        Kind::Pagoda => (asked.endpoint.internal_path(), asked.body.clone()),
        // Its cache too keeps tenants apart, where it knows the field.
        Kind::OpenAi => match &asked.handover.cache_salt {
            Some(salt) => {
                let salt = serde_json::Value::from(salt.as_str()).to_string();
                (asked.endpoint.path(), with_field(&asked.body, "cache_salt", salt.as_bytes()).into())
            }
            None => (asked.endpoint.path(), asked.body.clone()),
        },
    };
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = hyper::Uri::from_static(path);
    let headers = request.headers_mut();
    if let Ok(host) = HeaderValue::try_from(worker.upstream.address()) {
        headers.insert(HOST, host);
    }
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(HeaderName::from_static(REQUEST_ID), asked.request_id.clone());
    headers.extend(asked.headers.iter().cloned());
    if let Some(authorization) = &worker.config.authorization {
        headers.insert(AUTHORIZATION, authorization.clone());
    }
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_end_with_an_empty_line_of_either_kind() {
        assert_eq!(end_of_event(b"data: a\n\ndata: b\n\n"), Some(9));
        assert_eq!(end_of_event(b"data: a\r\n\r\nx"), Some(11));
        assert_eq!(end_of_event(b"data: a\n: c\r\n"), None);
        assert_eq!(end_of_event(b"data: a\r\n\r"), None);
    }

    #[test]
    fn what_every_worker_would_say_is_final_and_no_fault() {
        let of = |status| (is_final(status), LegError::Status(status).is_fault());
        assert_eq!(of(StatusCode::BAD_REQUEST), (true, false));
        assert_eq!(of(StatusCode::GATEWAY_TIMEOUT), (true, false));
        assert_eq!(of(StatusCode::TOO_MANY_REQUESTS), (false, false));
        assert_eq!(of(StatusCode::INTERNAL_SERVER_ERROR), (false, true));
    }
}
