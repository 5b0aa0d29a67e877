//! The router: one address in front of many engines.
//!
//! Run by `pagoda route`. A request on its way: `server` (body in) → `asked` (parsed once, its prompt chain) → `index` (who
//! holds how much of it) → `pick` (filter, score, order) → `dispatch` (tries, in order) → `leg` (one try at one worker) →
//! `relay` (the stream, continued elsewhere where it breaks). Invariants: a stale view picks a slower worker, never a wrong
//! answer; deciding is pure, acting is at the edge; nothing here tokenises.

pub mod asked;
pub mod config;
mod dispatch;
pub mod error;
pub mod estimate;
pub mod fleet;
pub mod index;
mod leg;
pub mod metrics;
pub mod pick;
pub mod policies;
pub mod recent;
mod relay;
pub mod ring;
pub mod server;
pub mod sessions;
mod trace;
pub mod worker;
pub mod workers_file;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use prometheus::Registry;

use config::RouterConfig;
use fleet::Fleet;
use metrics::RouterMetrics;
use sessions::Sessions;
use worker::connection::Connector;

/// What handlers share.
pub struct Router {
    pub(crate) config: RouterConfig,
    pub(crate) fleet: Fleet,
    pub(crate) sessions: Sessions,
    pub(crate) turn: AtomicU64,
    pub(crate) num_hedges: AtomicUsize,
}

impl Router {
    /// A router without workers.
    ///
    /// # Errors
    /// When its metrics cannot be registered.
    pub fn new(
        config: RouterConfig,
        registry: &Registry,
        connector: Arc<dyn Connector>,
    ) -> prometheus::Result<Arc<Self>> {
        let fleet = Fleet::new(&config, RouterMetrics::new(registry)?, connector);
        let (turn, num_hedges) = (AtomicU64::new(0), AtomicUsize::new(0));
        Ok(Arc::new(Self { config, fleet, sessions: Sessions::default(), turn, num_hedges }))
    }

    /// The workers.
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// All metrics as text.
    pub fn metrics_text(&self) -> String {
        self.fleet.shared().metrics.render(&self.fleet)
    }

    /// Names of all models that are served.
    pub fn models(&self) -> BTreeSet<String> {
        self.fleet.workers().iter().flat_map(|worker| worker.models()).collect()
    }

    /// What a request means that names no model: the first name of the first worker, as the worker itself would have it.
    fn only_model(&self) -> Option<String> {
        self.fleet.workers().iter().find_map(|worker| worker.models().into_iter().next())
    }
}
