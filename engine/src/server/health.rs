//! `GET /health` (the process works), `GET /ready` (it takes requests) and `GET /metrics`.

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use cache_tier::Store;
use serde_json::{Value, json};

use super::Shared;
use super::error::ApiError;
use crate::engine_loop::EngineState;

/// 200 unless the engine has failed.
pub(super) async fn health(State(server): Shared) -> (StatusCode, Json<Value>) {
    match server.engine.state() {
        EngineState::Loading(..) | EngineState::Ready(_) => (StatusCode::OK, Json(json!({ "status": "ok" }))),
        EngineState::LoadFailed(reason) | EngineState::Failed(reason) => {
            (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": "failed", "reason": reason })))
        }
    }
}

/// 200 once the model is loaded and until the server drains or the engine fails.
pub(super) async fn ready(State(server): Shared) -> (StatusCode, Json<Value>) {
    let not_ready = |body: Value| (StatusCode::SERVICE_UNAVAILABLE, Json(body));
    if server.is_draining() {
        return not_ready(json!({ "status": "draining" }));
    }
    match server.engine.state() {
        EngineState::Ready(device) => {
            let stats = server.engine.stats();
            let body = json!({
                "status": "ready",
                "device": device,
                "num_running": stats.num_running,
                "num_waiting": stats.num_waiting,
                "num_used_blocks": stats.num_used_blocks,
                "num_cached_blocks": stats.num_cached_blocks,
                "num_preemptions": stats.num_preemptions,
                "num_steps": stats.num_steps,
                "wasted_slot_steps": stats.wasted_slot_steps,
                "held_slot_steps": stats.held_slot_steps,
            });
            (StatusCode::OK, Json(body))
        }
        EngineState::Loading(loaded, total) => {
            not_ready(json!({ "status": "loading", "tensors_loaded": loaded, "tensors": total }))
        }
        EngineState::LoadFailed(reason) | EngineState::Failed(reason) => {
            not_ready(json!({ "status": "failed", "reason": reason }))
        }
    }
}

/// Prometheus' text format.
pub(super) async fn metrics(State(server): Shared) -> Response {
    let metrics = server.engine.metrics();
    metrics.kv.places(&server.engine.kv_store().stats());
    match metrics.render() {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("metrics: {error}")).into_response(),
    }
}
