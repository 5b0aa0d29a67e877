//! `GET /health` (the process works) and `GET /ready` (it takes requests).

use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde_json::{Value, json};

use super::Shared;
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
                "num_running": stats.num_running.load(Ordering::Relaxed),
                "num_waiting": stats.num_waiting.load(Ordering::Relaxed),
                "num_used_blocks": stats.num_used_blocks.load(Ordering::Relaxed),
                "num_steps": stats.num_steps.load(Ordering::Relaxed),
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
