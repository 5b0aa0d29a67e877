//! Scorers and their weights: each a folder, each a pure function from what is known to a number in [0, 1] a candidate.
//!
//! Used by `pick`. A preset is a list of weights; `--scorer NAME=WEIGHT` changes one. Invariant: a scorer reads views, and
//! nothing else.

mod kv_headroom;
mod least_load;
mod predicted_ttft;
mod prefix_cache;
mod queue;
mod random;
mod ring_affinity;
mod round_robin;
mod session_affinity;

use serde::{Deserialize, Serialize};

use crate::pick::{Ask, View};

/// A scorer, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scorer {
    /// Part of the prompt that is held.
    PrefixCache,
    /// The consistent-hash ring's choice for prompts that nobody holds.
    RingAffinity,
    /// Time to the first token, by the worker's own measured speed.
    PredictedTtft,
    /// KV blocks that are not in use.
    KvHeadroom,
    /// The worker that the session had last.
    SessionAffinity,
    /// Requests that wait.
    Queue,
    /// Requests that are there.
    LeastLoad,
    /// One after the other.
    RoundRobin,
    /// By lot.
    Random,
}

/// A scorer and what it counts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Weight {
    /// Which.
    pub scorer: Scorer,
    /// At least 0.
    pub weight: f64,
}

impl Scorer {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::PrefixCache,
        Self::RingAffinity,
        Self::PredictedTtft,
        Self::KvHeadroom,
        Self::SessionAffinity,
        Self::Queue,
        Self::LeastLoad,
        Self::RoundRobin,
        Self::Random,
    ];

    /// The scorer of a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scorer| scorer.name() == name)
    }

    /// As in flags and explanations.
    pub fn name(self) -> &'static str {
        match self {
            Self::PrefixCache => "prefix-cache",
            Self::RingAffinity => "ring-affinity",
            Self::PredictedTtft => "predicted-ttft",
            Self::KvHeadroom => "kv-headroom",
            Self::SessionAffinity => "session-affinity",
            Self::Queue => "queue",
            Self::LeastLoad => "least-load",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
        }
    }

    /// A score in [0, 1] for each candidate, which are places among the views.
    pub fn score(self, ask: &Ask, views: &[View], candidates: &[usize]) -> Vec<f64> {
        match self {
            Self::PrefixCache => prefix_cache::score(views, candidates),
            Self::RingAffinity => ring_affinity::score(ask, views, candidates),
            Self::PredictedTtft => predicted_ttft::score(ask, views, candidates),
            Self::KvHeadroom => kv_headroom::score(views, candidates),
            Self::SessionAffinity => session_affinity::score(ask, candidates),
            Self::Queue => queue::score(views, candidates),
            Self::LeastLoad => least_load::score(views, candidates),
            Self::RoundRobin => round_robin::score(ask, candidates),
            Self::Random => random::score(ask, candidates),
        }
    }
}

/// A named list of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// Ours.
    #[default]
    Pagoda,
    /// What llm-d ships: queue 2, KV 2, prefix 3.
    LlmDDefault,
    /// One after the other.
    RoundRobin,
    /// By lot.
    Random,
    /// The worker with the fewest requests.
    LeastLoad,
}

impl Preset {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Pagoda, Self::LlmDDefault, Self::RoundRobin, Self::Random, Self::LeastLoad];

    /// The preset of a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|preset| preset.name() == name)
    }

    /// As in flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pagoda => "pagoda",
            Self::LlmDDefault => "llm-d-default",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::LeastLoad => "least-load",
        }
    }

    /// Its scorers.
    pub fn weights(self) -> Vec<Weight> {
        let list: &[(Scorer, f64)] = match self {
            Self::Pagoda => &[
                (Scorer::PredictedTtft, 4.0),
                (Scorer::PrefixCache, 3.0),
                (Scorer::RingAffinity, 1.0),
                (Scorer::KvHeadroom, 0.25),
                (Scorer::SessionAffinity, 0.25),
            ],
            Self::LlmDDefault => &[(Scorer::Queue, 2.0), (Scorer::KvHeadroom, 2.0), (Scorer::PrefixCache, 3.0)],
            Self::RoundRobin => &[(Scorer::RoundRobin, 1.0)],
            Self::Random => &[(Scorer::Random, 1.0)],
            Self::LeastLoad => &[(Scorer::LeastLoad, 1.0)],
        };
        list.iter().map(|&(scorer, weight)| Weight { scorer, weight }).collect()
    }
}
