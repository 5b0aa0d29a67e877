//! The router's two doors: OpenAI's API for clients, and what operators ask.
//!
//! Served by `pagoda route`. A body is read within its limit and parsed once. Headers of clients decide nothing about which
//! host is asked.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router as Routes};
use serde_json::{Value, json};

use crate::Router;
use crate::asked::{Asked, Endpoint};
use crate::dispatch::EXPLAIN;
use crate::error::RouteError;
use crate::trace;

/// A body must be there by then.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

type Shared = State<Arc<Router>>;

/// What clients may ask.
pub fn routes(router: Arc<Router>) -> Routes {
    let generating = |endpoint| post(move |state, headers, body| ask(state, endpoint, headers, body));
    Routes::new()
        .route("/v1/chat/completions", generating(Endpoint::Chat))
        .route("/v1/completions", generating(Endpoint::Completions))
        .route("/tokenize", generating(Endpoint::Tokenize))
        .route("/detokenize", generating(Endpoint::Detokenize))
        .route("/v1/models", get(list_models))
        .route("/v1/models/{id}", get(one_model))
        .merge(open_routes())
        .fallback(not_found)
        .with_state(router)
}

/// What operators may ask, on the internal listener.
pub fn internal_routes(router: Arc<Router>) -> Routes {
    Routes::new()
        .route("/internal/v1/explain", post(explain))
        .route("/internal/v1/workers", get(workers))
        .merge(open_routes())
        .with_state(router)
}

fn open_routes() -> Routes<Arc<Router>> {
    Routes::new().route("/health", get(health)).route("/ready", get(ready)).route("/metrics", get(metrics))
}

async fn asked(router: &Router, endpoint: Endpoint, headers: &HeaderMap, body: Body) -> Result<Asked, RouteError> {
    let tenant = (router.config.tenant_of)(headers).ok_or(RouteError::NoKey)?;
    let limit = router.config.max_body_bytes;
    let told = headers.get(header::CONTENT_LENGTH).and_then(|len| len.to_str().ok()?.parse::<usize>().ok());
    if told.is_some_and(|len| len > limit) {
        return Err(RouteError::BodyTooLarge(limit));
    }
    let body = match tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, limit)).await {
        Err(_) => return Err(RouteError::BodyBroken(format!("not within {BODY_TIMEOUT:?}"))),
        Ok(Err(error)) if told.is_none() => {
            tracing::debug!(%error, "a body without a length");
            return Err(RouteError::BodyTooLarge(limit));
        }
        Ok(Err(error)) => return Err(RouteError::BodyBroken(error.to_string())),
        Ok(Ok(body)) => body,
    };
    Asked::parse(endpoint, headers, body, tenant, router.config.share_prefixes, || router.only_model())
}

async fn ask(State(router): Shared, endpoint: Endpoint, headers: HeaderMap, body: Body) -> Response {
    let explains = router.config.explain && headers.get(EXPLAIN).is_some_and(|value| value == "1");
    match asked(&router, endpoint, &headers, body).await {
        Ok(mut asked) => {
            if router.config.traced {
                trace::begin(&mut asked, &headers);
            }
            router.answer(asked, explains).await
        }
        Err(error) => error.into_response(),
    }
}

async fn explain(State(router): Shared, headers: HeaderMap, body: Body) -> Response {
    let body = match to_bytes(body, router.config.max_body_bytes).await {
        Ok(body) => body,
        Err(error) => return RouteError::BodyBroken(error.to_string()).into_response(),
    };
    let is_chat = serde_json::from_slice::<Value>(&body).is_ok_and(|body| body.get("messages").is_some());
    let endpoint = if is_chat { Endpoint::Chat } else { Endpoint::Completions };
    match Asked::parse(endpoint, &headers, body, "".into(), true, || router.only_model()) {
        Ok(asked) => Json(router.choose(&asked, &[]).explain(&router)).into_response(),
        Err(error) => error.into_response(),
    }
}

async fn workers(State(router): Shared) -> Json<Value> {
    let worker = |worker: &Arc<crate::worker::Worker>| {
        let told = worker.told();
        json!({
            "name": &*worker.name,
            "address": worker.upstream.address(),
            "fresh": worker.is_fresh(),
            "circuit_closed": worker.is_circuit_closed(),
            "num_requests": worker.num_requests(),
            "report": told.report.as_deref(),
        })
    };
    Json(router.fleet.workers().iter().map(worker).collect())
}

async fn list_models(State(router): Shared, headers: HeaderMap) -> Response {
    if (router.config.tenant_of)(&headers).is_none() {
        return RouteError::NoKey.into_response();
    }
    let data: Vec<Value> = router.models().iter().map(|name| model(name)).collect();
    Json(json!({ "object": "list", "data": data })).into_response()
}

async fn one_model(State(router): Shared, Path(id): Path<String>, headers: HeaderMap) -> Response {
    if (router.config.tenant_of)(&headers).is_none() {
        return RouteError::NoKey.into_response();
    }
    let served = router.models();
    match served.contains(&id) {
        true => Json(model(&id)).into_response(),
        false => {
            let served = served.into_iter().collect::<Vec<_>>().join(", ");
            RouteError::UnknownModel { asked: id, served }.into_response()
        }
    }
}

fn model(name: &str) -> Value {
    json!({ "id": name, "object": "model", "created": 0, "owned_by": "pagoda" })
}

async fn health() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// Whether any worker takes requests.
async fn ready(State(router): Shared) -> (StatusCode, Json<Value>) {
    let workers = router.fleet.workers();
    let takes = |worker: &&Arc<crate::worker::Worker>| {
        worker.is_fresh() && worker.told().report.is_some_and(|report| report.ready)
    };
    let num_ready = workers.iter().filter(takes).count();
    let status = if num_ready > 0 { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({ "num_workers": workers.len(), "num_ready": num_ready })))
}

async fn metrics(State(router): Shared) -> impl IntoResponse {
    let text = router.metrics_text();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text)
}

async fn not_found(method: Method, uri: axum::http::Uri) -> Response {
    let message = format!("there is no {method} {}", uri.path());
    let body = json!({ "error": { "message": message, "type": "invalid_request_error", "param": null, "code": null } });
    (StatusCode::NOT_FOUND, Json(body)).into_response()
}
