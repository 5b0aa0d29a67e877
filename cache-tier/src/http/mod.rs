//! `/kv/v1`: a store's blocks for other processes.
//!
//! On the internal listener of engines and of `pagoda cache serve`, behind the cluster's token; its client is `remote`. Every
//! body is bounded in bytes and time, and so is the number of those at once: beyond, the answer is 503 and the client
//! computes. A block is believed by nobody here: what comes in must be whole and named after its parent and tokens, what
//! goes out is checked by whoever receives it.

mod get;
mod put;

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use protocol::kv_wire::{self, LeaseAnswer, WireError};
use protocol::{BlockKey, Buffers, ModelFingerprint, Prefix};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::disk::DiskStore;
use crate::store::{PlaceStats, Store};

/// Longest lease.
const MAX_LEASE_MILLIS: u32 = 600_000;
/// A body of keys must be there by then.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Gets and puts at once: each holds a few frames.
const MAX_STREAMS: usize = 64;
/// Connections on which blocks are asked for; most of them wait.
const MAX_CONNECTIONS: usize = 1024;
/// So long a get or put waits for its turn.
const TURN_TIMEOUT: Duration = Duration::from_secs(1);

/// The model whose blocks are served; `None` until it is known.
pub type ModelOf = Arc<dyn Fn() -> Option<ModelFingerprint> + Send + Sync>;

/// What handlers share.
#[derive(Clone)]
pub struct KvService {
    store: Arc<dyn Store>,
    disk: Option<Arc<DiskStore>>,
    /// `None` serves any model.
    model: Option<ModelOf>,
    streams: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    /// Turns true when connections for blocks are to end.
    ends: watch::Sender<bool>,
    buffers: Arc<Buffers>,
}

impl KvService {
    /// Serves a store's blocks of every model.
    pub fn new(store: Arc<dyn Store>) -> Self {
        let streams = Arc::new(Semaphore::new(MAX_STREAMS));
        let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let ends = watch::Sender::new(false);
        Self { store, disk: None, model: None, streams, connections, ends, buffers: Arc::default() }
    }

    /// Serves a disk, which can be verified and compacted as well.
    pub fn of_disk(disk: Arc<DiskStore>) -> Self {
        Self { disk: Some(Arc::clone(&disk)), ..Self::new(disk) }
    }

    /// Serves a store's blocks of one model; keys of others are refused.
    pub fn of_model(store: Arc<dyn Store>, model: ModelOf) -> Self {
        Self { model: Some(model), ..Self::new(store) }
    }

    /// Routes below `/kv/v1`.
    pub fn router(self) -> Router {
        Router::new()
            .route("/kv/v1/lookup", post(lookup))
            .route("/kv/v1/get", get(get::get))
            .route("/kv/v1/put", post(put::put))
            .route("/kv/v1/lease", post(lease))
            .route("/kv/v1/stats", get(stats).post(stats))
            .route("/kv/v1/verify", post(verify))
            .route("/kv/v1/compact", post(compact))
            .with_state(self)
    }

    /// Lets the connections for blocks finish what they are sending, and waits for it.
    pub async fn end(&self) {
        self.ends.send_replace(true);
        drop(self.connections.acquire_many(MAX_CONNECTIONS as u32).await);
    }

    /// Whether blocks of this model are served here.
    fn check_model(&self, asked: &ModelFingerprint) -> Result<(), KvError> {
        let Some(model) = &self.model else { return Ok(()) };
        match model() {
            None => Err(KvError::unavailable("the model is being loaded")),
            Some(own) if own != *asked => Err(KvError::new(
                StatusCode::CONFLICT,
                format!("KV blocks of model {asked} were asked for; this engine has those of {own}"),
            )),
            Some(_) => Ok(()),
        }
    }

    /// A turn for a stream of blocks.
    async fn turn(&self) -> Result<OwnedSemaphorePermit, KvError> {
        let turn = tokio::time::timeout(TURN_TIMEOUT, Arc::clone(&self.streams).acquire_owned()).await;
        turn.ok().and_then(Result::ok).ok_or_else(|| KvError::unavailable("too many blocks are on their way at once"))
    }

    async fn keys(&self, body: Body) -> Result<Vec<BlockKey>, KvError> {
        let read = tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, kv_wire::MAX_KEYS_BYTES)).await;
        let slow = || KvError::new(StatusCode::REQUEST_TIMEOUT, format!("no whole body within {BODY_TIMEOUT:?}"));
        let large = |error| KvError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the list of keys: {error}"));
        let bytes = read.map_err(|_| slow())?.map_err(large)?;
        self.keys_of(&bytes)
    }

    fn keys_of(&self, list: &[u8]) -> Result<Vec<BlockKey>, KvError> {
        let keys = kv_wire::decode_keys(list)?;
        if let Some(key) = keys.first() {
            self.check_model(&key.model)?;
        }
        Ok(keys)
    }

    fn disk(&self) -> Result<Arc<DiskStore>, KvError> {
        self.disk.clone().ok_or_else(|| KvError::new(StatusCode::NOT_FOUND, "there is no disk of its own here".into()))
    }
}

/// A refusal: a status and an error object.
#[derive(Debug)]
pub(crate) struct KvError {
    status: StatusCode,
    message: String,
}

impl KvError {
    fn new(status: StatusCode, message: String) -> Self {
        Self { status, message }
    }

    fn unavailable(message: &str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message.into())
    }
}

impl From<WireError> for KvError {
    fn from(error: WireError) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error.to_string())
    }
}

impl IntoResponse for KvError {
    fn into_response(self) -> Response {
        let body = Json(json!({ "error": { "message": self.message, "code": self.status.as_u16() } }));
        let mut response = (self.status, body).into_response();
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

async fn lookup(State(service): State<KvService>, body: Body) -> Result<Json<Prefix>, KvError> {
    let keys = service.keys(body).await?;
    Ok(Json(service.store.lookup(&keys).await))
}

/// How long a lease holds.
#[derive(Deserialize)]
struct LeaseTime {
    #[serde(default = "default_lease")]
    millis: u32,
}

fn default_lease() -> u32 {
    30_000
}

async fn lease(
    State(service): State<KvService>,
    axum::extract::Query(LeaseTime { millis }): axum::extract::Query<LeaseTime>,
    body: Body,
) -> Result<Json<LeaseAnswer>, KvError> {
    let keys = service.keys(body).await?;
    Ok(Json(LeaseAnswer { leased: service.store.lease(&keys, millis.min(MAX_LEASE_MILLIS)).await }))
}

async fn stats(State(service): State<KvService>) -> Json<Vec<PlaceStats>> {
    Json(service.store.stats())
}

async fn verify(State(service): State<KvService>) -> Result<Response, KvError> {
    let disk = service.disk()?;
    let verified = tokio::task::spawn_blocking(move || disk.verify()).await;
    let failed = |error: tokio::task::JoinError| KvError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    Ok(Json(verified.map_err(failed)?).into_response())
}

async fn compact(State(service): State<KvService>) -> Result<Response, KvError> {
    Ok(Json(service.disk()?.compact().await).into_response())
}
