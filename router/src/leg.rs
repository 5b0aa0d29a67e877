//! One try of a request at one worker: the request is sent, its answer read event by event, or whole.
//!
//! Made by dispatch, and by the relay where a stream goes on elsewhere. Invariant: dropping a leg cancels its request at the
//! worker; its connection is used again only after an answer that was read to its end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use protocol::handover::{USED_HEADER, Used};

use crate::asked::{Asked, REQUEST_ID};
use crate::worker::connection::{Kept, UpstreamError};
use crate::worker::{InFlight, Kind, Worker};

/// How often a silent worker is looked at.
const LOOK: Duration = Duration::from_millis(250);
/// A worker that nobody has heard of for so long, on any way, is gone, and so is what it was doing.
const GONE_AFTER: Duration = Duration::from_secs(2);
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

    /// Whether it speaks against the worker. One that is busy, or goes away in order, has done nothing wrong.
    pub fn is_fault(&self) -> bool {
        match self {
            Self::HandOff => false,
            Self::Status(status) => !matches!(*status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS),
            _ => true,
        }
    }
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
    heard: Instant,
}

impl Leg {
    /// Sends a request to a worker and waits for the head of the answer.
    ///
    /// # Errors
    /// When it does not come.
    pub async fn open(asked: &Asked, worker: &Arc<Worker>, uncached: f64, limit: Duration) -> Result<Self, LegError> {
        let in_flight = worker.begin(uncached);
        let request = request(asked, worker);
        let sent = tokio::time::timeout(limit, worker.upstream.send(request));
        let answer = while_heard(worker, sent).await?;
        let (response, connection) = answer.map_err(|_| UpstreamError::Timeout(limit))??.into_parts();
        let (head, body) = response.into_parts();
        let (buffer, heard) = (BytesMut::new(), Instant::now());
        let head = Response::from_parts(head, ());
        Ok(Self { in_flight, head, body, connection: Some(connection), buffer, searched: 0, heard })
    }

    /// The worker.
    pub fn worker(&self) -> &Arc<Worker> {
        self.in_flight.worker()
    }

    /// Whether it tells what its events deliver.
    pub fn tells(&self) -> bool {
        self.worker().config.kind == Kind::Pagoda
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
        let body = while_heard(&worker, body).await?.map_err(|error| LegError::Broken(error.to_string()))?;
        if let Some(connection) = self.connection.take() {
            connection.give_back();
        }
        Ok((body.to_bytes(), self.in_flight))
    }

    /// The next event with its empty line, or what is left at the end; `None` after that. `limit` is for an answer that has
    /// begun.
    ///
    /// # Errors
    /// When the stream breaks, or the worker is gone.
    pub async fn next_event(&mut self, limit: Option<Duration>) -> Result<Option<Bytes>, LegError> {
        loop {
            if let Some(event) = self.buffered() {
                return Ok(Some(event));
            }
            if self.buffer.len() > MAX_BYTES {
                return Err(LegError::Broken(format!("an event of more than {MAX_BYTES} bytes")));
            }
            let Some(frame) = self.frame(limit).await? else {
                let rest = self.buffer.split().freeze();
                self.searched = 0;
                return Ok((!rest.is_empty()).then_some(rest));
            };
            self.buffer.extend_from_slice(&frame);
        }
    }

    /// An event that has come already.
    pub fn buffered(&mut self) -> Option<Bytes> {
        // The end may lie across what was there and what came.
        let from = self.searched.saturating_sub(1);
        let end = self.buffer[from..].windows(2).position(|pair| pair == b"\n\n");
        let Some(end) = end else {
            self.searched = self.buffer.len();
            return None;
        };
        self.searched = 0;
        Some(self.buffer.split_to(from + end + 2).freeze())
    }

    async fn frame(&mut self, limit: Option<Duration>) -> Result<Option<Bytes>, LegError> {
        loop {
            match tokio::time::timeout(LOOK, self.body.frame()).await {
                Ok(None) => return Ok(None),
                Ok(Some(frame)) => {
                    self.heard = Instant::now();
                    let frame = frame.map_err(|error| LegError::Broken(error.to_string()))?;
                    match frame.into_data() {
                        Ok(data) if data.has_remaining() => return Ok(Some(data)),
                        _ => {}
                    }
                }
                Err(_) => {
                    let silent = self.heard.elapsed();
                    let is_gone = silent > GONE_AFTER && !self.in_flight.worker().is_fresh();
                    if is_gone || limit.is_some_and(|limit| silent > limit) {
                        return Err(LegError::Silent);
                    }
                }
            }
        }
    }

    /// The stream was read to where it says that it ends: its connection may be used again.
    pub async fn finish(mut self) {
        let at_end = tokio::time::timeout(LOOK, self.body.frame()).await;
        if let (Ok(None), Some(connection)) = (at_end, self.connection.take()) {
            connection.give_back();
        }
    }
}

/// Waits for something that a worker does, as long as the worker is heard of.
async fn while_heard<T>(worker: &Worker, work: impl Future<Output = T>) -> Result<T, LegError> {
    let mut work = std::pin::pin!(work);
    let mut lost_since = None;
    loop {
        if let Ok(done) = tokio::time::timeout(LOOK, &mut work).await {
            return Ok(done);
        }
        if worker.is_fresh() {
            lost_since = None;
        } else if lost_since.get_or_insert_with(Instant::now).elapsed() > GONE_AFTER {
            return Err(LegError::Silent);
        }
    }
}

fn request(asked: &Asked, worker: &Worker) -> Request<Full<Bytes>> {
    let (path, body) = match worker.config.kind {
        Kind::Pagoda if asked.endpoint.generates() => {
            (asked.endpoint.internal_path(), asked.handover.added_to(&asked.body).into())
        }
        Kind::Pagoda => (asked.endpoint.internal_path(), asked.body.clone()),
        Kind::OpenAi => (asked.endpoint.path(), asked.body.clone()),
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
