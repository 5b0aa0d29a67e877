//! `POST /kv/v1/put`: blocks, read from the body one by one as the store takes them.
//!
//! The store's pace is the client's: the next frame is read when the last was taken.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use futures_util::StreamExt;
use protocol::kv_wire::{Decoder, PutAnswer};
use protocol::{KvFrame, PutOutcome, PutReason};

use super::{KvError, KvService};

/// Frames that are handed to the store together.
const BATCH: usize = 8;
/// Frames of one body.
const MAX_FRAMES: usize = 8192;
/// A client that sends nothing for so long is gone.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(10);

/// A body must have been taken by then.
const PUT_TIMEOUT: Duration = Duration::from_secs(120);

pub(super) async fn put(State(service): State<KvService>, body: Body) -> Result<Json<PutAnswer>, KvError> {
    let _turn = service.turn().await?;
    let slow = || KvError::new(StatusCode::REQUEST_TIMEOUT, format!("the body takes more than {PUT_TIMEOUT:?}"));
    tokio::time::timeout(PUT_TIMEOUT, take_all(&service, body)).await.unwrap_or_else(|_| Err(slow()))
}

async fn take_all(service: &KvService, body: Body) -> Result<Json<PutAnswer>, KvError> {
    let mut chunks = body.into_data_stream();
    let (mut decoder, mut reason, mut answer) =
        (Decoder::new(Arc::clone(&service.buffers)), None, PutAnswer::default());
    let mut batch = Vec::new();
    loop {
        let chunk = tokio::time::timeout(CHUNK_TIMEOUT, chunks.next()).await;
        let slow = || KvError::new(StatusCode::REQUEST_TIMEOUT, format!("no more blocks within {CHUNK_TIMEOUT:?}"));
        let Some(chunk) = chunk.map_err(|_| slow())? else { break };
        let torn = |error: axum::Error| KvError::new(StatusCode::BAD_REQUEST, format!("the body ended early: {error}"));
        decoder.push(&chunk.map_err(torn)?);
        if reason.is_none() {
            reason = decoder.put_header()?;
        }
        let Some(reason) = reason else { continue };
        while let Some(frame) = decoder.frame()? {
            batch.push(frame);
            if answer.outcomes.len() + batch.len() > MAX_FRAMES {
                let message = format!("more than {MAX_FRAMES} blocks in one body");
                return Err(KvError::new(StatusCode::PAYLOAD_TOO_LARGE, message));
            }
            if batch.len() == BATCH {
                take(service, std::mem::take(&mut batch), reason, &mut answer).await;
            }
        }
    }
    let Some(reason) = reason.filter(|_| decoder.is_empty()) else {
        return Err(KvError::new(StatusCode::BAD_REQUEST, "the body ends within a block".into()));
    };
    take(service, batch, reason, &mut answer).await;
    Ok(Json(answer))
}

/// Offers the frames that are what they say to the store.
async fn take(service: &KvService, frames: Vec<KvFrame>, reason: PutReason, answer: &mut PutAnswer) {
    let is_good = |frame: &KvFrame| {
        let identity = &frame.header.identity;
        frame.check().is_ok() && identity.is_consistent() && service.check_model(&identity.key.model).is_ok()
    };
    let good: Vec<bool> = frames.iter().map(is_good).collect();
    let offered = frames.into_iter().zip(&good).filter_map(|(frame, &good)| good.then_some(frame)).collect();
    let mut outcomes = service.store.put(offered, reason).await.into_iter();
    let outcome = |good: &bool| if *good { outcomes.next() } else { None };
    answer.outcomes.extend(good.iter().map(outcome).map(|outcome| outcome.unwrap_or(PutOutcome::Refused)));
}
