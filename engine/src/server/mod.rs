//! The engine's HTTP server: OpenAI's API, health, tokenising.
//!
//! Started by `pagoda serve`. Handlers parse at the edge, hand token ids to the engine and stream its events; only this
//! folder knows OpenAI's JSON (invariant 4 of ARCHITECTURE.md). Every refusal of a request is
//! OpenAI's error object.

mod answer;
mod auth;
mod body;
mod chain;
mod chat;
mod completions;
mod connection;
mod conversation;
mod error;
mod events;
mod health;
mod internal;
mod logprobs;
mod models;
mod prompt;
mod relayed;
mod request;
mod stream;
mod tls;
mod tokenize;
mod trace;

use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, Method, Request, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tokio::sync::{Notify, Semaphore, watch};
use tower_http::cors::{AllowOrigin, CorsLayer};

use crate::chat_template::ChatTemplate;
use crate::engine_loop::EngineHandle;
use crate::tokenizer::Tokenizer;
pub use auth::ApiKeys;
pub use connection::{ConnectionLimits, serve, serve_connection};
use error::ApiError;
pub use internal::{internal_router, with_cluster_token};
pub use tls::acceptor;

/// Settings of the server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Names that requests may ask for; the first is reported.
    pub served_model_names: Vec<String>,
    /// Origins whose pages may call us; `*` is all.
    pub allowed_origins: Vec<String>,
    /// Largest request body.
    pub max_body_bytes: usize,
    /// Keys that open the API; none is open to all.
    pub api_keys: ApiKeys,
    /// Most log probabilities a token.
    pub max_logprobs: usize,
    /// Longest that a request may take; `None` is no bound.
    pub max_request_time: Option<Duration>,
}

impl Default for ServerConfig {
    /// No names, no origins, no keys, 16 MiB.
    fn default() -> Self {
        Self {
            served_model_names: Vec::new(),
            allowed_origins: Vec::new(),
            max_body_bytes: 16 << 20,
            api_keys: ApiKeys::default(),
            max_logprobs: 20,
            max_request_time: None,
        }
    }
}

/// What handlers share.
pub struct Server {
    engine: EngineHandle,
    tokenizer: Arc<Tokenizer>,
    chat_template: Option<ChatTemplate>,
    config: ServerConfig,
    started_at_s: u64,
    draining: watch::Sender<bool>,
    event_readers: events::NumReaders,
    drain_asked: Notify,
    /// Prompts being rendered and tokenised.
    preparing: Arc<Semaphore>,
    /// Conversations being looked at with their answers.
    announcing: Arc<Semaphore>,
    /// Bytes of bodies that may be in memory.
    body_bytes: Arc<Semaphore>,
    /// Another at each start.
    epoch: u64,
    /// Bytes of all texts that were tokenised, and their tokens.
    text_bytes: AtomicU64,
    text_tokens: AtomicU64,
}

/// Handlers' view of the server.
type Shared = State<Arc<Server>>;

impl Server {
    /// A server over a started engine.
    pub fn new(
        engine: EngineHandle,
        tokenizer: Arc<Tokenizer>,
        chat_template: Option<ChatTemplate>,
        config: ServerConfig,
    ) -> Arc<Self> {
        let started_at_s = answer::unix_time_s();
        let preparing = Arc::new(Semaphore::new(std::thread::available_parallelism().map_or(1, NonZero::get)));
        let epoch = getrandom::u64().unwrap_or(started_at_s);
        Arc::new(Self {
            engine,
            tokenizer,
            chat_template,
            body_bytes: Arc::new(Semaphore::new(body::bytes_at_once(config.max_body_bytes))),
            config,
            started_at_s,
            draining: watch::Sender::new(false),
            event_readers: events::NumReaders::new(0),
            drain_asked: Notify::new(),
            preparing,
            announcing: Arc::new(Semaphore::new(1)),
            epoch,
            text_bytes: AtomicU64::new(0),
            text_tokens: AtomicU64::new(0),
        })
    }

    /// From now on new requests are refused and `/ready` says no; running streams go on.
    pub fn drain(&self) {
        self.draining.send_replace(true);
    }

    /// Asks whoever runs the server to end it.
    fn ask_to_drain(&self) {
        self.drain();
        self.drain_asked.notify_one();
    }

    /// Waits until somebody asks for the end.
    pub async fn drain_asked(&self) {
        self.drain_asked.notified().await;
    }

    fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// The name reported in answers.
    fn model_name(&self) -> &str {
        self.config.served_model_names.first().map_or("", String::as_str)
    }

    fn check_model(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            Some(name) if !self.config.served_model_names.iter().any(|served| served == name) => {
                Err(ApiError::model_not_found(name, &self.config.served_model_names))
            }
            _ => Ok(()),
        }
    }

    fn check_serving(&self) -> Result<(), ApiError> {
        if self.is_draining() { Err(ApiError::unavailable("the server is shutting down")) } else { Ok(()) }
    }
}

/// All routes.
///
/// # Errors
/// When an allowed origin is not a header value.
pub fn router(server: Arc<Server>) -> Result<Router, String> {
    let cors = cors(&server.config.allowed_origins)?;
    let router = Router::new()
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{id}", get(models::one))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/health", get(health::health))
        .route("/ready", get(health::ready))
        .route("/metrics", get(health::metrics))
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(not_found)
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&server), auth::check_key))
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&server), check_origin))
        .layer(axum::middleware::from_fn(trace::request_span))
        .with_state(server);
    Ok(match cors {
        Some(cors) => router.layer(cors),
        None => router,
    })
}

fn cors(origins: &[String]) -> Result<Option<CorsLayer>, String> {
    if origins.is_empty() {
        return Ok(None);
    }
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        let values: Result<Vec<HeaderValue>, String> =
            origins.iter().map(|origin| origin.parse().map_err(|_| format!("`{origin}` is not an origin"))).collect();
        AllowOrigin::list(values?)
    };
    let headers = [header::CONTENT_TYPE, header::AUTHORIZATION];
    Ok(Some(CorsLayer::new().allow_origin(allowed).allow_methods([Method::GET, Method::POST]).allow_headers(headers)))
}

/// A browser lets any page send a simple request to a loopback address, CORS or not: it is refused here.
async fn check_origin(State(server): Shared, request: Request<Body>, next: Next) -> Response {
    let origin = request.headers().get(header::ORIGIN).and_then(|origin| origin.to_str().ok());
    let allowed = &server.config.allowed_origins;
    match origin {
        Some(origin) if !allowed.iter().any(|allowed| allowed == "*" || allowed == origin) => {
            let message = format!("pages of {origin} may not call this server; allow them with --allowed-origins");
            ApiError::new(StatusCode::FORBIDDEN, message).into_response()
        }
        _ => next.run(request).await,
    }
}

async fn not_found(request: Request<Body>) -> Response {
    let message = format!("there is no {} {}", request.method(), request.uri().path());
    ApiError::new(StatusCode::NOT_FOUND, message).into_response()
}

async fn method_not_allowed(request: Request<Body>) -> Response {
    let message = format!("{} is not allowed on {}", request.method(), request.uri().path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).into_response()
}
