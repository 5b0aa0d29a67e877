//! Following a Pagoda engine: its stream of events into the index and its state, again and again.
//!
//! A task a worker, started by the fleet. Invariants: what was known under another epoch, or before a gap, is replaced as a whole
//! by the next snapshot, and until then stands: a view that is old picks a slower worker, nothing worse.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{Request, StatusCode};
use protocol::WorkerEvent;
use protocol::worker_event::{EventDecoder, EventError};

use super::connection::UpstreamError;
use super::{STALE_AFTER, Worker};
use crate::fleet::Shared;

/// Between two tries to reach a worker.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// For a connection and the head of the answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// Why a stream of events ended.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
    #[error("answered with {0}")]
    Status(StatusCode),
    #[error("broke: {0}")]
    Broken(#[from] hyper::Error),
    #[error("said nothing for {0:?}")]
    Silent(Duration),
    #[error(transparent)]
    Event(#[from] EventError),
    #[error("change {found} came where {expected} was due")]
    Gap { expected: u64, found: u64 },
    #[error("began with something else than a hello")]
    NoHello,
    #[error("ended")]
    Ended,
    #[error("the request is none: {0}")]
    Request(#[from] hyper::http::Error),
}

/// Follows a worker until the task is ended.
pub async fn follow(worker: Arc<Worker>, shared: Arc<Shared>) {
    let (mut pause, mut told) = (FIRST_PAUSE, String::new());
    loop {
        let (mut reached, began) = (false, Instant::now());
        let ended = stream(&worker, &shared, &mut reached).await;
        worker.lost();
        if reached {
            // One that comes and goes is not followed at every turn: each costs a snapshot.
            if began.elapsed() > LONGEST_PAUSE {
                pause = FIRST_PAUSE;
            }
            shared.metrics.resyncs.with_label_values(&[&worker.name]).inc();
        }
        if let Err(error) = ended {
            // One that answers with what cannot be used is told of, once: nobody would look for it among those that are away.
            let unusable = matches!(error, StreamError::Event(_) | StreamError::NoHello | StreamError::Status(_));
            if reached {
                tracing::warn!(worker = %worker.name, %error, "the worker's events stopped");
            } else if unusable && told != error.to_string() {
                tracing::warn!(worker = %worker.name, %error, "the worker cannot be followed and gets no requests");
                told = error.to_string();
            } else {
                tracing::debug!(worker = %worker.name, %error, "the worker is not reached");
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

async fn stream(worker: &Arc<Worker>, shared: &Arc<Shared>, reached: &mut bool) -> Result<(), StreamError> {
    let mut request = Request::get("/internal/v1/events").header(HOST, worker.upstream.address());
    if let Some(authorization) = &worker.config.authorization {
        request = request.header(AUTHORIZATION, authorization);
    }
    let sent = worker.upstream.send(request.body(Full::default())?);
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, sent).await;
    let (response, _connection) = answer.map_err(|_| StreamError::Silent(ANSWER_TIMEOUT))??.into_parts();
    if response.status() != StatusCode::OK {
        return Err(StreamError::Status(response.status()));
    }
    let mut events = Events { body: response.into_body(), decoder: EventDecoder::default() };
    let WorkerEvent::Hello { mut sequence, report, .. } = events.next().await? else {
        return Err(StreamError::NoHello);
    };
    tracing::info!(worker = %worker.name, models = ?report.models, device = report.device, "a worker is followed");
    worker.report(*report);
    // A number of its own: the old one answers until all of the snapshot is there.
    let mut own = shared.own_slot().ok_or(StreamError::Ended)?;
    let slot = own.slot();
    loop {
        match events.next().await? {
            WorkerEvent::Snapshot(chunks) => shared.index.store(slot, &chunks),
            WorkerEvent::SnapshotEnd => break,
            WorkerEvent::Report(report) => worker.report(*report),
            WorkerEvent::Hello { .. } | WorkerEvent::Change { .. } => {}
        }
    }
    shared.recent.forget(worker.estimated);
    // The guard has the old number from here on, and frees that.
    own.exchange(worker.set_slot(slot));
    drop(own);
    *reached = true;
    loop {
        match events.next().await? {
            WorkerEvent::Change { sequence: found, removed, stored } => {
                if found != sequence + 1 {
                    return Err(StreamError::Gap { expected: sequence + 1, found });
                }
                sequence = found;
                shared.metrics.events.inc_by((removed.len() + stored.len()) as u64);
                shared.index.remove(slot, &removed);
                shared.index.store(slot, &stored);
                worker.heard();
            }
            WorkerEvent::Report(report) => worker.report(*report),
            WorkerEvent::Hello { .. } | WorkerEvent::Snapshot(_) | WorkerEvent::SnapshotEnd => {}
        }
    }
}

struct Events {
    body: Incoming,
    decoder: EventDecoder,
}

impl Events {
    async fn next(&mut self) -> Result<WorkerEvent, StreamError> {
        loop {
            if let Some(event) = self.decoder.next_event()? {
                return Ok(event);
            }
            let frame = tokio::time::timeout(STALE_AFTER, self.body.frame()).await;
            let frame = frame.map_err(|_| StreamError::Silent(STALE_AFTER))?.ok_or(StreamError::Ended)??;
            let piece: Bytes = frame.into_data().unwrap_or_default();
            self.decoder.push(&piece);
        }
    }
}
