//! `GET /kv/v1/get`: upgrades a connection to one on which lists of keys are asked and blocks are answered.
//!
//! Behind the upgrade there is no HTTP: blocks go from the store's memory to the socket, and at the other end from the socket
//! to where they stay. A client that reads slowly holds few blocks: two reads are ahead of it. Invariant: at most
//! `MAX_CONNECTIONS` of these, each closed when it asks for nothing, or takes nothing, for a minute.

use std::io;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::{Buf, BytesMut};
use futures_util::{StreamExt, stream};
use hyper_util::rt::TokioIo;
use protocol::kv_wire::{self, STREAM_PROTOCOL, encode_record, encode_refusal};
use protocol::{BlockKey, Lookup};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::{BODY_TIMEOUT, KvError, KvService};

/// Keys that are read together.
const KEYS_AT_ONCE: usize = 4;
/// Reads ahead of the client.
const READS_AHEAD: usize = 2;
/// An answer as a whole: shorter than the pins on what it sends, which may be overwritten after those.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(50);
/// A connection that asks for nothing for so long is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) async fn get(State(service): State<KvService>, mut request: Request) -> Result<Response, KvError> {
    let wanted = request.headers().get(UPGRADE).map(HeaderValue::as_bytes);
    if wanted != Some(STREAM_PROTOCOL.as_bytes()) {
        let message = format!("blocks are asked for on a connection upgraded to {STREAM_PROTOCOL}");
        return Err(KvError::new(StatusCode::UPGRADE_REQUIRED, message));
    }
    let place = std::sync::Arc::clone(&service.connections).try_acquire_owned();
    let place = place.map_err(|_| KvError::unavailable("too many connections ask for blocks"))?;
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        if let Ok(Ok(io)) = timeout(BODY_TIMEOUT, upgrade).await
            && let Err(error) = serve(&service, &mut TokioIo::new(io)).await
        {
            tracing::debug!(%error, "a connection for blocks ended");
        }
        drop(place);
    });
    let headers = [(CONNECTION, "upgrade"), (UPGRADE, STREAM_PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers, Body::empty()).into_response())
}

/// Answers one request after the other, until the client goes, one is refused, or the service ends.
async fn serve(service: &KvService, io: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    let mut ends = service.ends.subscribe();
    loop {
        let len = tokio::select! {
            _ = ends.wait_for(|ends| *ends) => return Ok(()),
            len = timeout(IDLE_TIMEOUT, io.read_u32_le()) => len,
        };
        let Ok(Ok(len)) = len else { return Ok(()) };
        let keys = match timeout(BODY_TIMEOUT, keys(service, io, len as usize)).await? {
            Ok(keys) => keys,
            Err(Refusal::Io(error)) => return Err(error),
            Err(Refusal::Said(message)) => return refuse(io, &message).await,
        };
        match service.turn().await {
            Ok(_turn) => timeout(ANSWER_TIMEOUT, answer(service, &keys, io)).await??,
            Err(_) => busy(keys.len(), io).await?,
        }
    }
}

/// The answer where there are too many: each of the blocks may be here.
async fn busy(num_keys: usize, io: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    let record = encode_record::<()>(&Lookup::Busy);
    timeout(BODY_TIMEOUT, io.write_all(&record.repeat(num_keys))).await??;
    io.flush().await
}

/// Why a request has no answer.
enum Refusal {
    Io(io::Error),
    Said(String),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

async fn keys(service: &KvService, io: &mut (impl AsyncRead + Unpin), len: usize) -> Result<Vec<BlockKey>, Refusal> {
    if len > kv_wire::MAX_KEYS_BYTES {
        return Err(Refusal::Said(format!("a list of keys of {len} bytes: at most {}", kv_wire::MAX_KEYS_BYTES)));
    }
    let mut list = Vec::new();
    if io.take(len as u64).read_to_end(&mut list).await? < len {
        return Err(Refusal::Io(io::ErrorKind::UnexpectedEof.into()));
    }
    service.keys_of(&list).map_err(|error| Refusal::Said(error.message))
}

async fn refuse(io: &mut (impl AsyncWrite + Unpin), message: &str) -> io::Result<()> {
    io.write_all(&encode_refusal(message)).await?;
    io.shutdown().await
}

async fn answer(service: &KvService, keys: &[BlockKey], io: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    let batches: Vec<&[BlockKey]> = keys.chunks(KEYS_AT_ONCE).collect();
    let reads: Vec<_> = batches.into_iter().map(|keys| service.store.get_to_send(keys)).collect();
    let mut reads = stream::iter(reads).buffered(READS_AHEAD);
    while let Some(found) = reads.next().await {
        // What is not there is told in one piece.
        let mut records = BytesMut::new();
        for lookup in found {
            records.extend_from_slice(&encode_record(&lookup));
            if let Lookup::Hit(frame) = lookup {
                let head = records.split().freeze();
                io.write_all_buf(&mut head.chain(frame.header.encode()).chain(frame.payload)).await?;
            }
        }
        io.write_all(&records).await?;
    }
    io.flush().await
}
