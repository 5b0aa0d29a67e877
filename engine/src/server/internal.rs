//! The internal listener: what the cluster asks of an engine, apart from what clients may.
//!
//! On loopback by default; elsewhere it wants the cluster's token. Never reached through the public listener.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use cache_tier::http::KvService;
use protocol::WorkerReport;
use protocol::report::{Capacity, Load, Rates, Role};
use serde_json::{Value, json};

use super::auth::{Caller, check_cluster_token};
use super::relayed::OfRouter;
use super::{Server, Shared, chat, completions, events, health, tokenize, trace};
use crate::engine_loop::EngineState;
use crate::kv::BLOCK_SIZE;

/// Routes of the internal listener; with a token, only its holders are served.
pub fn internal_router(server: Arc<Server>, cluster_token: Option<&str>) -> Router {
    let engine = server.engine.clone();
    let kv = KvService::of_model(server.engine.kv_store(), Arc::new(move || engine.fingerprint()));
    let generation = Router::new()
        .route("/internal/v1/chat/completions", post(chat::chat_completions))
        .route("/internal/v1/completions", post(completions::completions))
        .route("/internal/v1/tokenize", post(tokenize::tokenize))
        .route("/internal/v1/detokenize", post(tokenize::detokenize))
        .layer(Extension(OfRouter))
        .layer(Extension(Caller::router()))
        .layer(axum::middleware::from_fn(trace::request_span))
        .with_state(Arc::clone(&server));
    let closed = Router::new()
        .route("/internal/v1/report", get(report))
        .route("/internal/v1/events", get(events::events))
        .route("/internal/v1/drain", post(drain))
        .with_state(Arc::clone(&server))
        .merge(generation)
        .merge(kv.router());
    with_cluster_token(closed, cluster_token)
        .merge(
            Router::new().route("/health", get(health::health)).route("/ready", get(health::ready)).with_state(server),
        )
        .fallback(super::not_found)
}

/// Routes that only holders of the token reach, where there is one.
pub fn with_cluster_token(router: Router, cluster_token: Option<&str>) -> Router<()> {
    let token = cluster_token.map(|token| blake3::hash(token.as_bytes()));
    router.layer(axum::middleware::from_fn_with_state(token, check_cluster_token))
}

/// Ends this process as SIGTERM does: no new requests, running ones finish, KV blocks go down.
async fn drain(State(server): Shared) -> (StatusCode, Json<Value>) {
    server.ask_to_drain();
    (StatusCode::ACCEPTED, Json(json!({ "status": "draining" })))
}

async fn report(State(server): Shared) -> Json<WorkerReport> {
    Json(server.report())
}

impl Server {
    /// What this engine tells of itself, now.
    pub fn report(&self) -> WorkerReport {
        let (stats, shape) = (self.engine.stats(), self.engine.shape());
        let device = match self.engine.state() {
            EngineState::Ready(device) => device,
            _ => String::new(),
        };
        let (bytes, tokens) = (self.text_bytes.load(Ordering::Relaxed), self.text_tokens.load(Ordering::Relaxed));
        WorkerReport {
            wire: WorkerReport::WIRE,
            models: self.config.served_model_names.clone(),
            fingerprint: self.engine.fingerprint().map_or_else(String::new, |fingerprint| fingerprint.to_string()),
            ready: !device.is_empty() && !self.is_draining(),
            device,
            role: Role::Both,
            epoch: self.epoch,
            load: Load {
                num_running: stats.num_running,
                num_waiting: self.engine.num_in_engine().saturating_sub(stats.num_running),
                num_uncomputed_tokens: stats.num_uncomputed_tokens,
                num_used_blocks: stats.num_used_blocks,
                draining: self.is_draining(),
            },
            capacity: Capacity {
                num_blocks: shape.num_blocks,
                block_size: BLOCK_SIZE,
                max_num_seqs: shape.max_num_seqs,
                max_model_len: shape.max_model_len,
                max_queue: shape.max_queue,
            },
            rates: Rates {
                prefill_tokens_per_s: stats.rate.prefill_tokens_per_s(),
                decode_step_s: stats.rate.decode_step_s(),
                bytes_per_token: if tokens == 0 { 0.0 } else { bytes as f64 / tokens as f64 },
            },
        }
    }
}
