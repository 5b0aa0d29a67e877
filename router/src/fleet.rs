//! All workers: who there is, the ring over them, and a view of each for a request.
//!
//! Owned by the router; changed when the file of workers changes. Invariants: places are those of one list, which a request
//! keeps from its first look to its last; a worker that goes takes its tasks and its chunks with it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use protocol::PromptChain;
use tokio::task::JoinHandle;

use crate::config::RouterConfig;
use crate::estimate::Estimates;
use crate::index::{Index, Slot};
use crate::metrics::RouterMetrics;
use crate::pick::View;
use crate::recent::Recent;
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
    /// What others may hold.
    pub estimates: Estimates,
    /// What was sent of late.
    pub recent: Recent,
    /// Numbers in the index.
    pub slots: Slots,
    /// Counters.
    pub metrics: RouterMetrics,
}

impl Shared {
    /// Takes all of a number's chunks, and then the number, beside whatever else goes on: that reads the whole index.
    fn forget(self: &Arc<Self>, slot: Slot) {
        let shared = Arc::clone(self);
        let work = move || {
            shared.index.remove_worker(slot);
            shared.slots.give_back(slot);
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(work)),
            // The router ends.
            Err(_) => work(),
        }
    }

    /// A number that is given back with its chunks unless somebody keeps it.
    pub fn own_slot(self: &Arc<Self>) -> Option<OwnSlot> {
        Some(OwnSlot { slot: self.slots.take()?, shared: Arc::clone(self) })
    }
}

/// A number in the index, which is forgotten when this is dropped.
pub struct OwnSlot {
    slot: Slot,
    shared: Arc<Shared>,
}

impl OwnSlot {
    /// The number.
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// From now on it is another.
    pub fn exchange(&mut self, slot: Slot) {
        self.slot = slot;
    }
}

impl Drop for OwnSlot {
    fn drop(&mut self) {
        self.shared.forget(self.slot);
    }
}

struct Followed {
    worker: Arc<Worker>,
    task: JoinHandle<()>,
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
            shared: Arc::new(Shared { index, estimates, recent: Recent::default(), slots, metrics }),
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
            Kind::OpenAi => tokio::spawn(probe::look(follower, shared)),
        };
        Some(Followed { worker, task })
    }

    fn leave(&self, gone: Followed) {
        tracing::info!(worker = %gone.worker.name, "a worker is taken out");
        gone.worker.lost();
        let (shared, Followed { worker, task }) = (Arc::clone(&self.shared), gone);
        self.shared.metrics.forget(&worker.name);
        // Its task may be in the middle of storing: what it stored is forgotten after it.
        tokio::spawn(async move {
            task.abort();
            drop(task.await);
            shared.estimates.forget(worker.estimated);
            shared.recent.forget(worker.estimated);
            shared.slots.give_back(worker.estimated);
            shared.forget(worker.slot());
        });
    }

    /// A view of each worker for a prompt, in their order, and how many tokens the prompt has, about.
    pub fn views(&self, workers: &[Arc<Worker>], model: &str, chain: &PromptChain) -> (Vec<View>, f64) {
        let mut views: Vec<View> = workers.iter().map(|worker| worker.view(model)).collect();
        let num_tokens = num_tokens(&views, chain.num_bytes());
        let chunks = chain.chunks();
        let mut held = self.shared.index.held(chunks);
        let mut expected = self.shared.estimates.held(chunks);
        expected.extend(self.shared.recent.held(chain));
        held.sort_unstable_by_key(|held| held.slot);
        let a_chunk = num_tokens / chunks.len().max(1) as f64;
        let speeds: Vec<f64> = views.iter().map(|view| view.prefill_tokens_per_s).collect();
        let weights = ring::weights(&speeds);
        for ((view, worker), weight) in views.iter_mut().zip(workers).zip(weights) {
            view.weight = weight;
            if let Ok(at) = held.binary_search_by_key(&worker.slot(), |held| held.slot) {
                view.held_share = held[at].num_chunks as f64 / chunks.len().max(1) as f64;
                view.held_tokens = f64::from(held[at].num_tokens).min(num_tokens);
            }
            // Few: what was sent of late, and what others may hold.
            for held in expected.iter().filter(|held| held.slot == worker.estimated) {
                view.held_share = view.held_share.max(held.num_chunks as f64 / chunks.len().max(1) as f64);
                view.held_tokens = view.held_tokens.max(held.num_chunks as f64 * a_chunk);
            }
        }
        (views, num_tokens)
    }

    /// Workers by place in the order in which the ring gives them a key.
    pub fn walk(&self, workers: &[Arc<Worker>], views: &[View], key: u64, most: usize) -> Vec<usize> {
        let on_ring = |(place, (worker, view)): (usize, (&Arc<Worker>, &View))| RingWorker {
            name: worker.config.name.clone(),
            place,
            weight: view.weight,
        };
        let ring = Arc::clone(&self.ring.read().unwrap_or_else(PoisonError::into_inner));
        let is_current = ring.workers().len() == workers.len()
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

/// Tokens of so many bytes, by what workers have measured.
fn num_tokens(views: &[View], num_bytes: usize) -> f64 {
    let measured = views.iter().map(|view| view.bytes_per_token).find(|bytes| *bytes > 0.0);
    // Of English text.
    num_bytes as f64 / measured.unwrap_or(4.0)
}

impl Drop for Fleet {
    fn drop(&mut self) {
        lock(&self.followed).drain(..).for_each(|followed| followed.task.abort());
    }
}
