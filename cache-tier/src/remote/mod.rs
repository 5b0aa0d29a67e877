//! A store in another process, over `/kv/v1`: `--kv-tier URL`.
//!
//! Invariant: it never makes its caller wait beyond its deadlines, and after a failure it is not asked again for a while:
//! the answer is busy at once. Connections are kept and used again; the transport is behind one trait.

mod connection;
mod stream;

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Response, StatusCode};
use protocol::kv_frame::KvFrame;
use protocol::kv_wire::{self, LeaseAnswer, PutAnswer};
use protocol::{BlockHash, BlockKey, Buffers, Lookup, Prefix, PutOutcome, PutReason};
use tokio::time::Instant;

use crate::ghost::Ghost;
use crate::policy::Place;
use crate::store::{PlaceStats, Store};
use connection::Connections;
pub use connection::{Connector, Io, RemoteUrl, TcpConnector, TlsConnector};
use stream::BlockStream;

/// Reading every block of a large disk takes its time.
const CARE_TIMEOUT: Duration = Duration::from_secs(3600);

/// Blocks that are remembered to be there.
const MAX_KNOWN: usize = 1 << 16;

/// Deadlines of a remote store.
#[derive(Clone, Copy, Debug)]
pub struct RemoteLimits {
    /// A connection, and the answer to a lookup or lease.
    pub answer: Duration,
    /// Between two pieces of a get's answer.
    pub piece: Duration,
    /// A get as a whole.
    pub get: Duration,
    /// A put as a whole.
    pub put: Duration,
    /// After the first failure it is not asked for so long; the time doubles with each further one.
    pub first_pause: Duration,
    /// Longest such pause.
    pub longest_pause: Duration,
}

impl Default for RemoteLimits {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(1),
            piece: Duration::from_secs(2),
            get: Duration::from_secs(60),
            put: Duration::from_secs(10),
            first_pause: Duration::from_millis(500),
            longest_pause: Duration::from_secs(30),
        }
    }
}

/// A failed request to the tier.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// It did not answer in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The connection failed.
    #[error("{0}")]
    Connection(String),
    /// It refused.
    #[error("it refuses: {0}")]
    Refused(String),
    /// Its answer cannot be read.
    #[error("its answer is not understood: {0}")]
    Garbage(String),
}

#[derive(Debug)]
struct Health {
    failures: u32,
    paused_until: Option<Instant>,
}

/// The client.
pub struct RemoteStore {
    connections: Connections,
    limits: RemoteLimits,
    health: Mutex<Health>,
    stats: Mutex<PlaceStats>,
    buffers: Arc<Buffers>,
    /// Blocks that it has had: they are not sent again, until it says that it lacks them.
    known: Mutex<Ghost>,
}

impl RemoteStore {
    /// A store that is reached through a connector.
    pub fn new(connector: Arc<dyn Connector>, token: Option<&str>, limits: RemoteLimits) -> Self {
        Self {
            connections: Connections::new(connector, token),
            limits,
            health: Mutex::new(Health { failures: 0, paused_until: None }),
            stats: Mutex::new(PlaceStats::new(Place::Remote)),
            buffers: Arc::default(),
            known: Mutex::new(Ghost::new(MAX_KNOWN)),
        }
    }

    /// Host and port.
    pub fn address(&self) -> &str {
        self.connections.address()
    }

    /// Asks for what an operator wants to know or have done: a path below `/kv/v1` whose answer is JSON.
    ///
    /// # Errors
    /// When it does not answer, or refuses.
    pub async fn care<T: serde::de::DeserializeOwned>(&self, path: &str) -> Result<T, RemoteError> {
        self.ask_json(path, Vec::new(), CARE_TIMEOUT).await
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counted(&self) -> MutexGuard<'_, PlaceStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_paused(&self) -> bool {
        self.health().paused_until.is_some_and(|until| Instant::now() < until)
    }

    /// Notes how a request went.
    fn note<T>(&self, what: &str, result: Result<T, RemoteError>) -> Option<T> {
        let mut health = self.health();
        match result {
            Ok(value) => {
                if health.failures > 0 {
                    tracing::info!(tier = self.connections.address(), "the KV tier answers again");
                }
                *health = Health { failures: 0, paused_until: None };
                Some(value)
            }
            Err(error) => {
                // Of requests that were under way together, the first to fail speaks for all.
                if health.paused_until.is_some_and(|until| Instant::now() < until) {
                    return None;
                }
                let pause = self.limits.first_pause.saturating_mul(1 << health.failures.min(16));
                let pause = pause.min(self.limits.longest_pause);
                health.failures += 1;
                health.paused_until = Some(Instant::now() + pause);
                let failures = health.failures;
                tracing::warn!(tier = self.connections.address(), what, %error, failures, ?pause, "the KV tier failed");
                None
            }
        }
    }

    /// One request; dropping it gives its connection up.
    async fn ask(&self, path: &str, body: Vec<Bytes>, limit: Duration) -> Result<Response<Incoming>, RemoteError> {
        let response = within(limit, self.connections.post(path, body)).await?;
        if response.status() == StatusCode::OK {
            return Ok(response);
        }
        Err(within(limit, async { Ok(refusal(response).await) }).await.unwrap_or_else(|error| error))
    }

    async fn ask_json<T: serde::de::DeserializeOwned>(
        &self,
        path: &str,
        body: Vec<Bytes>,
        limit: Duration,
    ) -> Result<T, RemoteError> {
        let response = self.ask(path, body, limit).await?;
        let bytes = within(limit, read_all(response, 1 << 20)).await?;
        serde_json::from_slice(&bytes).map_err(|error| RemoteError::Garbage(error.to_string()))
    }

    /// Asks for blocks, on a kept connection where there is one; what came before a failure is among the answers.
    async fn fetch(&self, keys: &[BlockKey], answers: &mut Vec<Lookup<KvFrame>>) -> Result<(), RemoteError> {
        let list = keys_body(keys);
        let request = [&(list.len() as u32).to_le_bytes(), &list[..]].concat();
        if let Some(kept) = self.connections.kept_stream() {
            match self.receive(kept, &request, keys, answers).await {
                // It may have been closed at the other end while nobody used it, or its other end may be gone: so may all be.
                Err(RemoteError::Connection(_) | RemoteError::Timeout(_)) if answers.is_empty() => {
                    self.connections.forget_streams();
                }
                result => return result,
            }
        }
        let stream = within(self.limits.answer, self.connections.stream(Arc::clone(&self.buffers))).await?;
        self.receive(stream, &request, keys, answers).await
    }

    async fn receive(
        &self,
        mut stream: BlockStream,
        request: &[u8],
        keys: &[BlockKey],
        answers: &mut Vec<Lookup<KvFrame>>,
    ) -> Result<(), RemoteError> {
        within(self.limits.piece, stream.ask(request)).await?;
        let all = async {
            for key in keys {
                let lookup = stream.next(self.limits.piece).await?;
                // Answers come in the order of the keys: one for another means that the two ends count differently.
                if let Lookup::Hit(frame) = &lookup
                    && frame.header.identity.key != *key
                {
                    return Err(RemoteError::Garbage(format!("block {} is answered with another", key.block)));
                }
                answers.push(self.checked(key, lookup));
            }
            Ok(())
        };
        within(self.limits.get, all).await?;
        self.connections.keep_stream(stream);
        Ok(())
    }

    /// A block that is damaged or another's is none.
    fn checked(&self, key: &BlockKey, lookup: Lookup<KvFrame>) -> Lookup<KvFrame> {
        match lookup {
            Lookup::Hit(frame) if frame.check().is_err() => {
                tracing::warn!(tier = self.connections.address(), block = %key.block, "the KV tier sent a damaged block");
                self.counted().damaged += 1;
                Lookup::Miss
            }
            lookup => lookup,
        }
    }
}

impl RemoteStore {
    /// Which of these it is known to have; the rest is to be sent.
    fn present(&self, frames: &[KvFrame]) -> Vec<PutOutcome> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let has = |frame: &KvFrame| known.contains(frame.header.identity.key.short());
        frames.iter().map(|frame| if has(frame) { PutOutcome::Present } else { PutOutcome::Busy }).collect()
    }

    async fn send(&self, frames: &[KvFrame], reason: PutReason) -> Vec<PutOutcome> {
        let mut outcomes = vec![PutOutcome::Busy; frames.len()];
        if !frames.is_empty() && !self.is_paused() {
            let header = [kv_wire::encode_put_header(reason)];
            let parts = frames.iter().flat_map(|frame| [frame.header.encode(), frame.payload.clone()]);
            let body = header.into_iter().chain(parts).collect();
            let answer = self.ask_json::<PutAnswer>("/kv/v1/put", body, self.limits.put).await;
            let answer = self.note("put", answer).map(|answer| answer.outcomes);
            outcomes = answer.filter(|answers| answers.len() == frames.len()).unwrap_or(outcomes);
        }
        let mut stats = self.counted();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for (&outcome, frame) in outcomes.iter().zip(frames) {
            stats.count_put(outcome, frame.encoded_len() as u64);
            if matches!(outcome, PutOutcome::Stored | PutOutcome::Present) {
                known.note(frame.header.identity.key.short());
            }
        }
        outcomes
    }
}

async fn within<T>(limit: Duration, work: impl Future<Output = Result<T, RemoteError>>) -> Result<T, RemoteError> {
    tokio::time::timeout(limit, work).await.unwrap_or(Err(RemoteError::Timeout(limit)))
}

/// What a refusal says.
async fn refusal(response: Response<Incoming>) -> RemoteError {
    let status = response.status();
    let body = read_all(response, 64 << 10).await.unwrap_or_default();
    let message = serde_json::from_slice::<serde_json::Value>(&body)
        .map_or_else(|_| String::from_utf8_lossy(&body).into_owned(), |body| body["error"]["message"].to_string());
    RemoteError::Refused(format!("{status}: {message}"))
}

async fn read_all(response: Response<Incoming>, limit: usize) -> Result<Bytes, RemoteError> {
    let body = http_body_util::Limited::new(response.into_body(), limit).collect().await;
    Ok(body.map_err(|error| RemoteError::Garbage(error.to_string()))?.to_bytes())
}

/// The body of keys, all of one model.
fn keys_body(keys: &[BlockKey]) -> Bytes {
    let Some(first) = keys.first() else { return Bytes::new() };
    let blocks: Vec<BlockHash> = keys.iter().map(|key| key.block).collect();
    kv_wire::encode_keys(&first.model, &blocks)
}

impl Store for RemoteStore {
    fn place(&self) -> Place {
        Place::Remote
    }

    fn lookup<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Prefix> {
        Box::pin(async move {
            if keys.is_empty() {
                return Prefix::default();
            }
            let busy = Prefix { num_blocks: 0, busy: true };
            if self.is_paused() {
                return busy;
            }
            let keys = &keys[..keys.len().min(kv_wire::MAX_KEYS)];
            let found = self.ask_json::<Prefix>("/kv/v1/lookup", vec![keys_body(keys)], self.limits.answer).await;
            let found = self.note("lookup", found).unwrap_or(busy);
            if let Some(missing) = keys.get(found.num_blocks).filter(|_| !found.busy) {
                self.known.lock().unwrap_or_else(PoisonError::into_inner).take(missing.short());
            }
            Prefix { num_blocks: found.num_blocks.min(keys.len()), ..found }
        })
    }

    fn get<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Vec<Lookup<KvFrame>>> {
        Box::pin(async move {
            let mut answers = Vec::with_capacity(keys.len());
            if !keys.is_empty() && !self.is_paused() {
                let asked = &keys[..keys.len().min(kv_wire::MAX_KEYS)];
                let fetched = self.fetch(asked, &mut answers).await;
                self.note("get", fetched);
            }
            // What came before a failure is whole and is used.
            answers.resize_with(keys.len(), || Lookup::Busy);
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            for (key, answer) in keys.iter().zip(&answers) {
                match answer {
                    Lookup::Hit(_) => known.note(key.short()),
                    Lookup::Miss => drop(known.take(key.short())),
                    Lookup::Busy => {}
                }
            }
            drop(known);
            self.counted().count_lookups(&answers);
            answers
        })
    }

    fn put(&self, frames: Vec<KvFrame>, reason: PutReason) -> BoxFuture<'_, Vec<PutOutcome>> {
        Box::pin(async move {
            // What must not be lost is sent whatever is remembered.
            let may_skip = !matches!(reason, PutReason::Drain | PutReason::Handoff);
            let mut outcomes = if may_skip { self.present(&frames) } else { vec![PutOutcome::Busy; frames.len()] };
            let is_new = |(_, outcome): &(KvFrame, &PutOutcome)| **outcome != PutOutcome::Present;
            let sent: Vec<KvFrame> = frames.into_iter().zip(&outcomes).filter(is_new).map(|(frame, _)| frame).collect();
            let mut answers = self.send(&sent, reason).await.into_iter();
            for outcome in outcomes.iter_mut().filter(|outcome| **outcome != PutOutcome::Present) {
                *outcome = answers.next().unwrap_or(PutOutcome::Busy);
            }
            outcomes
        })
    }

    fn lease<'a>(&'a self, keys: &'a [BlockKey], millis: u32) -> BoxFuture<'a, usize> {
        Box::pin(async move {
            if keys.is_empty() || self.is_paused() {
                return 0;
            }
            let path = format!("/kv/v1/lease?millis={millis}");
            let answer = self.ask_json::<LeaseAnswer>(&path, vec![keys_body(keys)], self.limits.answer).await;
            self.note("lease", answer).map_or(0, |answer| answer.leased)
        })
    }

    fn stats(&self) -> Vec<PlaceStats> {
        vec![*self.counted()]
    }
}
