//! The router's settings.
//!
//! Made by `pagoda route`; pure values, apart from who may ask, which is a function.

use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;

use crate::policies::{Preset, Weight};
use crate::worker::breaker::BreakerLimits;

/// Who asks: the name of the key that a request carries; `None` refuses it.
pub type TenantOf = Arc<dyn Fn(&HeaderMap) -> Option<Arc<str>> + Send + Sync>;

/// Settings.
#[derive(Clone)]
pub struct RouterConfig {
    /// Scorers and what they count.
    pub weights: Vec<Weight>,
    /// Who may ask.
    pub tenant_of: TenantOf,
    /// Whether tenants may find each other's prompts in caches.
    pub share_prefixes: bool,
    /// Workers that a request is tried on, at most, before its first token; and how often its stream goes on elsewhere.
    pub max_tries: usize,
    /// For the head of an answer that is streamed; whole answers take as long as they take.
    pub answer_timeout: Duration,
    /// A stream that has begun and says nothing for so long goes on elsewhere.
    pub stream_timeout: Duration,
    /// A worker that has not begun to answer after so long gets a rival.
    pub hedge_after: Option<Duration>,
    /// When a worker is not asked for a while.
    pub breaker: BreakerLimits,
    /// Largest request body.
    pub max_body_bytes: usize,
    /// Chunks in the index, at most.
    pub index_capacity: usize,
    /// Whether a client may ask how its request was routed.
    pub explain: bool,
    /// Whether spans are exported: each request then has one.
    pub traced: bool,
    /// Whether each request is logged, without its text.
    pub access_log: bool,
    /// Tokens by which predicted and real hit may differ before it is said; worker by worker, on average.
    pub max_misprediction: f64,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            weights: Preset::default().weights(),
            tenant_of: Arc::new(|_| Some("".into())),
            share_prefixes: false,
            max_tries: 3,
            answer_timeout: Duration::from_secs(600),
            stream_timeout: Duration::from_secs(60),
            hedge_after: None,
            breaker: BreakerLimits::default(),
            max_body_bytes: 16 << 20,
            index_capacity: 16 << 20,
            explain: false,
            traced: false,
            access_log: false,
            max_misprediction: 256.0,
        }
    }
}
