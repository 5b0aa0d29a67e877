//! A client's request, parsed once: what decides where it goes, and what is sent there.
//!
//! Made by the server from headers and body; read by dispatch and relay. The body is passed on as it came, with one field
//! more to our own engines.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use axum::http::HeaderMap;
use bytes::Bytes;
use hyper::header::{HeaderName, HeaderValue};
use protocol::openai::RoutedRequest;
use protocol::{Handover, PromptChain};
use tracing::Span;
use twox_hash::XxHash3_64;

use crate::error::RouteError;

/// Headers of the client that workers get too: the trace that it is part of.
const PASSED_ON: [&str; 2] = ["traceparent", "tracestate"];
/// The header that names a request.
pub const REQUEST_ID: &str = "x-request-id";
/// The header that names a session.
const SESSION: &str = "x-session-id";
/// Longest name of a session or request that is kept.
const MAX_NAME: usize = 256;

/// Which of OpenAI's endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/tokenize`
    Tokenize,
    /// `/detokenize`
    Detokenize,
}

impl Endpoint {
    /// Its path at a server of OpenAI's API.
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Tokenize => "/tokenize",
            Self::Detokenize => "/detokenize",
        }
    }

    /// Its path at an engine's internal listener.
    pub fn internal_path(self) -> &'static str {
        match self {
            Self::Chat => "/internal/v1/chat/completions",
            Self::Completions => "/internal/v1/completions",
            Self::Tokenize => "/internal/v1/tokenize",
            Self::Detokenize => "/internal/v1/detokenize",
        }
    }

    /// Whether it generates.
    pub fn generates(self) -> bool {
        matches!(self, Self::Chat | Self::Completions)
    }
}

/// A request.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Where it came in.
    pub endpoint: Endpoint,
    /// As it came.
    pub body: Bytes,
    /// The model asked for; empty for the one there is.
    pub model: String,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Answers wanted.
    pub n: usize,
    /// Longest answer; 0 where none is given.
    pub max_tokens: usize,
    /// Names the session.
    pub session: Option<String>,
    /// Whose it is.
    pub tenant: Arc<str>,
    /// Names the request in logs and traces.
    pub request_id: HeaderValue,
    /// Headers that go on.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Of the request in its trace; of nothing where traces are not exported.
    pub(crate) span: Span,
    /// Its content, for routing.
    pub chain: Arc<PromptChain>,
    /// Which worker's turn it is on the ring.
    pub ring_key: u64,
    /// What our engines are told beside the body.
    pub handover: Handover,
}

/// Numbers that no other process draws, one after the other: names of answers, and seeds where a client chose none.
fn random() -> u64 {
    static KEY: OnceLock<u64> = OnceLock::new();
    static DRAWN: AtomicU64 = AtomicU64::new(0);
    // A router without randomness still routes.
    let key = *KEY.get_or_init(|| getrandom::u64().unwrap_or_else(|_| unix_time_nanos()));
    let number = DRAWN.fetch_add(1, Ordering::Relaxed);
    XxHash3_64::oneshot_with_seed(key, &[number.to_le_bytes(), key.to_le_bytes()].concat())
}

fn unix_time_nanos() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |elapsed| elapsed.as_nanos() as u64)
}

impl Asked {
    /// Reads a request. `model_of` tells the model where the body names none.
    ///
    /// # Errors
    /// When the body is no request.
    pub fn parse(
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: Bytes,
        tenant: Arc<str>,
        share_prefixes: bool,
        model_of: impl Fn() -> Option<String>,
    ) -> Result<Self, RouteError> {
        let request = RoutedRequest::parse(&body, endpoint == Endpoint::Chat)
            .map_err(|error| RouteError::BadBody(error.to_string()))?;
        let model = request.model.as_deref().map(str::to_owned).or_else(model_of).unwrap_or_default();
        let cache_salt = match (&*tenant, share_prefixes) {
            ("", _) | (_, true) => None,
            // Behind its length, so that no tenant's salt is the beginning of another's.
            (tenant, false) => Some(format!("tenant {} {tenant} {}", tenant.len(), request.cache_salt)),
        };
        let chain = request.chain(&model, cache_salt.as_deref().unwrap_or(&request.cache_salt));
        let ring_key = ring_key(&chain, request.first_user_message());
        let name = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let session = name(SESSION).or(request.user.as_deref()).filter(|name| name.len() <= MAX_NAME);
        let given = headers.get(REQUEST_ID).filter(|id| id.len() <= MAX_NAME).cloned();
        let fresh_id = || HeaderValue::try_from(format!("req-{:016x}", random())).ok();
        let request_id = given.or_else(fresh_id).unwrap_or_else(|| HeaderValue::from_static("req"));
        let passed_on =
            PASSED_ON.iter().filter_map(|&name| Some((HeaderName::from_static(name), headers.get(name)?.clone())));
        let prefix = if endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
        let handover = Handover {
            id: format!("{prefix}-{:016x}{:016x}", random(), random()),
            created: unix_time_nanos() / 1_000_000_000,
            seed: (!request.has_seed).then(random),
            cache_salt,
            resume: Vec::new(),
            usage_told: false,
            elapsed_ms: 0,
        };
        Ok(Self {
            endpoint,
            model,
            stream: request.stream && endpoint.generates(),
            n: request.n,
            max_tokens: request.max_tokens.unwrap_or(0),
            session: session.map(|name| format!("{tenant} {name}")),
            headers: passed_on.collect(),
            span: Span::none(),
            tenant,
            request_id,
            chain: Arc::new(chain),
            ring_key,
            handover,
            body,
        })
    }
}

/// The chain's first chunk of the user's first message: one system prompt that all share does not send the world to one worker,
/// and prompts that begin alike go to one.
fn ring_key(chain: &PromptChain, first_user_message: usize) -> u64 {
    let chunks = chain.chunks();
    let first = chunks.iter().find(|chunk| chunk.message as usize == first_user_message);
    first.or(chunks.first()).map_or(0, |chunk| chunk.hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(body: &str, tenant: &str) -> Asked {
        let body = Bytes::copy_from_slice(body.as_bytes());
        Asked::parse(Endpoint::Chat, &HeaderMap::new(), body, tenant.into(), false, || Some("m".into())).unwrap()
    }

    #[test]
    fn tenants_are_kept_apart_whatever_salt_they_send() {
        let body = |salt: &str| format!(r#"{{"messages":[{{"role":"user","content":"a"}}],"cache_salt":"{salt}"}}"#);
        let (a, b) = (asked(&body(""), "a"), asked(&body(""), "b"));
        assert_ne!((&a.handover.cache_salt, &a.chain), (&b.handover.cache_salt, &b.chain));
        assert_ne!(asked(&body("b x"), "a").handover.cache_salt, asked(&body("x"), "a b").handover.cache_salt);
        assert_eq!(asked(&body("s"), "").handover.cache_salt, None, "without tenants the client's salt stands");
        assert_eq!(a.chain, asked(&body(""), "a").chain);
    }

    #[test]
    fn the_ring_key_is_of_the_beginning_of_the_users_first_message() {
        let body = |system: &str, user: &str| {
            format!(r#"{{"messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{user}"}}]}}"#)
        };
        let long = "x".repeat(256);
        let key = |system: &str, user: &str| asked(&body(system, user), "").ring_key;
        assert_eq!(key("s", &format!("{long}a")), key("s", &format!("{long}b")));
        assert_ne!(key("s", "a"), key("s", "b"));
    }

    #[test]
    fn a_seed_is_drawn_where_the_client_chose_none() {
        assert!(asked(r#"{"messages":[],"seed":0}"#, "").handover.seed.is_none());
        let drawn = asked(r#"{"messages":[]}"#, "").handover;
        assert!(drawn.seed.is_some() && drawn.id.starts_with("chatcmpl-") && drawn.id.len() == 41);
    }
}
