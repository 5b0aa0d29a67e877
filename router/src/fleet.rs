//! All workers: who there is, the ring over them, and a view of each for a request.
//!
//! Owned by the router; changed when the file of workers changes. Invariants: places are those of one list, which a request
//! keeps from its first look to its last; a worker that goes takes its tasks and its chunks with it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use protocol::PromptChain;
use tokio::task::AbortHandle;

use crate::config::RouterConfig;
use crate::estimate::Estimates;
use crate::index::{Index, Slot};
use crate::metrics::RouterMetrics;
use crate::pick::View;
use crate::ring::{self, Ring, RingWorker};
use crate::worker::connection::{Connector, Upstream};
use crate::worker::{Kind, Worker, WorkerConfig, events, probe};

/// Numbers for workers in the index.
#[derive(Debug)]
pub struct Slots(Mutex<Vec<Slot>>);

impl Default for Slots {
    fn default() -> Self {
        Self(Mutex::new((0..Slot::MAX).rev().collect()))
    }
}

impl Slots {
    /// A number that nobody has.
    pub fn take(&self) -> Option<Slot> {
        lock(&self.0).pop()
    }

    fn give_back(&self, slot: Slot) {
        lock(&self.0).push(slot);
    }
}

/// What all workers' tasks write to.
pub struct Shared {
    /// What workers say that they hold.
    pub index: Index,
    /// What they may hold.
    pub estimates: Estimates,
    /// Numbers in the index.
    pub slots: Slots,
    /// Counters.
    pub metrics: RouterMetrics,
}

impl Shared {
    /// Takes all of a number's chunks, and then the number.
    pub fn forget(self: &Shared, slot: Slot) {
        self.index.remove_worker(slot);
        self.slots.give_back(slot);
    }
}

struct Followed {
    worker: Arc<Worker>,
    task: AbortHandle,
}

/// The workers.
pub struct Fleet {
    shared: Arc<Shared>,
    connector: Arc<dyn Connector>,
    followed: Mutex<Vec<Followed>>,
    workers: RwLock<Arc<Vec<Arc<Worker>>>>,
    ring: RwLock<Arc<Ring>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Fleet {
    /// No workers yet.
    pub fn new(config: &RouterConfig, metrics: RouterMetrics, connector: Arc<dyn Connector>) -> Self {
        let index = Index::new(config.index_capacity);
        let (estimates, slots) = (Estimates::default(), Slots::default());
        Self {
            shared: Arc::new(Shared { index, estimates, slots, metrics }),
            connector,
            followed: Mutex::default(),
            workers: RwLock::default(),
            ring: RwLock::new(Arc::new(Ring::new(Vec::new()))),
        }
    }

    /// Index, estimates, counters.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The workers, in an order that stays theirs.
    pub fn workers(&self) -> Arc<Vec<Arc<Worker>>> {
        Arc::clone(&self.workers.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// From now on these are the workers. Those that were there before go on.
    pub fn set(&self, configs: Vec<WorkerConfig>) {
        let mut followed = lock(&self.followed);
        let mut before: HashMap<String, Followed> =
            followed.drain(..).map(|followed| (followed.worker.config.name.clone(), followed)).collect();
        for config in configs {
            match before.remove(&config.name) {
                Some(same) if same.worker.config == config => followed.push(same),
                other => {
                    if let Some(other) = other {
                        self.leave(other);
                    }
                    followed.extend(self.join(config));
                }
            }
        }
        before.into_values().for_each(|gone| self.leave(gone));
        let workers: Vec<Arc<Worker>> = followed.iter().map(|followed| Arc::clone(&followed.worker)).collect();
        *self.workers.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(workers);
    }

    fn join(&self, config: WorkerConfig) -> Option<Followed> {
        let (Some(slot), Some(estimated)) = (self.shared.slots.take(), self.shared.slots.take()) else {
            tracing::error!(worker = config.name, "there are too many workers; this one is not asked");
            return None;
        };
        let upstream = Upstream::new(config.address.clone(), Arc::clone(&self.connector));
        let kind = config.kind.clone();
        let worker = Arc::new(Worker::new(config, upstream, slot, estimated));
        let (follower, shared) = (Arc::clone(&worker), Arc::clone(&self.shared));
        let task = match kind {
            Kind::Pagoda => tokio::spawn(events::follow(follower, shared)),
            Kind::OpenAi => tokio::spawn(probe::look(follower)),
        };
        Some(Followed { worker, task: task.abort_handle() })
    }

    fn leave(&self, gone: Followed) {
        tracing::info!(worker = %gone.worker.name, "a worker is taken out");
        gone.task.abort();
        gone.worker.lost();
        self.shared.estimates.forget(gone.worker.estimated);
        self.shared.slots.give_back(gone.worker.estimated);
        self.shared.forget(gone.worker.slot());
        self.shared.metrics.forget(&gone.worker.name);
    }

    /// A view of each worker for a prompt, in their order, and how many tokens the prompt has, about.
    pub fn views(&self, workers: &[Arc<Worker>], model: &str, chain: &PromptChain) -> (Vec<View>, f64) {
        let mut views: Vec<View> = workers.iter().map(|worker| worker.view(model)).collect();
        let num_tokens = self.num_tokens(workers, chain.num_bytes());
        let chunks = chain.chunks();
        let (held, estimated) = (self.shared.index.held(chunks), self.shared.estimates.held(chunks));
        let held: HashMap<Slot, _> = held.into_iter().map(|held| (held.slot, held)).collect();
        let estimated: HashMap<Slot, _> = estimated.into_iter().map(|held| (held.slot, held)).collect();
        let speeds: Vec<f64> = views.iter().map(|view| view.prefill_tokens_per_s).collect();
        let weights = ring::weights(&speeds);
        for ((view, worker), weight) in views.iter_mut().zip(workers).zip(weights) {
            view.weight = weight;
            let known = held.get(&worker.slot());
            let expected = estimated.get(&worker.estimated);
            if let Some(held) = [known, expected].into_iter().flatten().max_by_key(|held| held.num_chunks) {
                view.held_share = held.num_chunks as f64 / chunks.len().max(1) as f64;
                view.held_tokens = f64::from(held.num_tokens).min(num_tokens);
            }
        }
        (views, num_tokens)
    }

    /// Tokens of so many bytes, by what workers have measured.
    fn num_tokens(&self, workers: &[Arc<Worker>], num_bytes: usize) -> f64 {
        let a_token = workers.iter().find_map(|worker| {
            let report = worker.told().report?;
            Some(report.rates.bytes_per_token).filter(|bytes| *bytes > 0.0)
        });
        // Of English text.
        num_bytes as f64 / a_token.unwrap_or(4.0)
    }

    /// Workers by place in the order in which the ring gives them a key.
    pub fn walk(&self, workers: &[Arc<Worker>], views: &[View], key: u64, most: usize) -> Vec<usize> {
        let on_ring = |(place, (worker, view)): (usize, (&Arc<Worker>, &View))| RingWorker {
            name: worker.config.name.clone(),
            place,
            weight: view.weight,
        };
        let ring = Arc::clone(&self.ring.read().unwrap_or_else(PoisonError::into_inner));
        let is_current = ring.len() == workers.len()
            && views
                .iter()
                .zip(ring.workers())
                .all(|(view, on_ring)| view.weight == on_ring.weight && *view.name == *on_ring.name);
        let ring = if is_current {
            ring
        } else {
            let ring = Arc::new(Ring::new(workers.iter().zip(views).enumerate().map(on_ring).collect()));
            *self.ring.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&ring);
            ring
        };
        ring.walk(key).take(most).collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        lock(&self.followed).drain(..).for_each(|followed| followed.task.abort());
    }
}
