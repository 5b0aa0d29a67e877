//! `GET /internal/v1/events`: what this engine holds and how it is, as it changes.
//!
//! Each reader has a stream of its own, at its own pace; one that is too far behind is ended and starts again. The records are
//! `protocol::worker_event`'s.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use futures_util::stream;
use protocol::worker_event::{CONTENT_TYPE, MAX_CHUNKS};
use protocol::{WorkerEvent, WorkerReport};
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::time::Instant;

use super::error::ApiError;
use super::{Server, Shared};
use crate::announcer::Subscription;

/// How often a report that has changed is sent.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);
/// How often one is sent that has not, so that a reader knows that this engine lives.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Changes that are sent together.
const MAX_TOGETHER: usize = 64;

/// A reader, counted while it reads.
struct Reader {
    server: Arc<Server>,
    subscription: Subscription,
    /// What was told last, and when.
    reported: (WorkerReport, Instant),
    /// When it was last looked whether there is more to tell.
    looked: Instant,
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.server.event_readers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Server {
    /// Whether anybody follows what this engine holds.
    pub(super) fn has_event_readers(&self) -> bool {
        self.event_readers.load(Ordering::Relaxed) > 0
    }
}

/// Readers that follow at once.
pub(super) type NumReaders = AtomicUsize;

pub(super) async fn events(State(server): Shared) -> Result<Response, ApiError> {
    let ended = || ApiError::unavailable("the engine has ended");
    let subscription = server.engine.subscribe().await.ok_or_else(ended)?;
    server.event_readers.fetch_add(1, Ordering::Relaxed);
    let report = server.report();
    let now = Instant::now();
    let mut reader = Reader { reported: (report, now), looked: now, server, subscription };
    let first = reader.beginning();
    let state = (Some(first), reader);
    let pieces = stream::unfold(state, |(first, mut reader)| async move {
        let piece = match first {
            Some(first) => first,
            None => reader.next().await?,
        };
        Some((Ok::<Bytes, Infallible>(piece), (None, reader)))
    });
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], Body::from_stream(pieces)).into_response())
}

impl Reader {
    /// Hello and snapshot.
    fn beginning(&mut self) -> Bytes {
        let mut out = BytesMut::new();
        let (sequence, report) = (self.subscription.sequence, Box::new(self.reported.0.clone()));
        WorkerEvent::Hello { epoch: self.server.epoch, sequence, report }.encode(&mut out);
        let held = std::mem::take(&mut self.subscription.held);
        held.chunks(MAX_CHUNKS).for_each(|part| WorkerEvent::Snapshot(part.to_vec()).encode(&mut out));
        WorkerEvent::SnapshotEnd.encode(&mut out);
        out.freeze()
    }

    /// What is to be told next; `None` where the reader is too far behind or the engine has ended.
    async fn next(&mut self) -> Option<Bytes> {
        let mut out = BytesMut::new();
        loop {
            let look = self.looked + REPORT_INTERVAL;
            match tokio::time::timeout_at(look, self.subscription.changes.recv()).await {
                Ok(Ok(event)) => event.encode(&mut out),
                Ok(Err(RecvError::Lagged(_) | RecvError::Closed)) => return None,
                Err(_) => {}
            }
            for _ in 0..MAX_TOGETHER {
                match self.subscription.changes.try_recv() {
                    Ok(event) => event.encode(&mut out),
                    Err(TryRecvError::Empty) => break,
                    Err(_) => return None,
                }
            }
            self.report(&mut out);
            if !out.is_empty() {
                return Some(out.freeze());
            }
        }
    }

    /// Adds a report where it is time for one.
    fn report(&mut self, out: &mut BytesMut) {
        let now = Instant::now();
        if now < self.looked + REPORT_INTERVAL {
            return;
        }
        self.looked = now;
        let since = now - self.reported.1;
        let report = self.server.report();
        if report != self.reported.0 || since >= HEARTBEAT {
            WorkerEvent::Report(Box::new(report.clone())).encode(out);
            self.reported = (report, now);
        }
    }
}
