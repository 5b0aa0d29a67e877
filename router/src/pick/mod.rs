//! Which worker a request goes to: filter, score, pick. Pure: what is known comes in, an order comes out.
//!
//! Called by dispatch with views of all workers; a scorer is a folder below `policies`. Invariants: the same views and the same
//! request give the same order in every router; a worker that is filtered out is never in it; ties fall by the seed.

mod filter;

use std::sync::Arc;

use serde::Serialize;
use twox_hash::XxHash3_64;

pub use filter::Refusal;

use crate::policies::{Scorer, Weight};

/// What is known of a worker when a request comes.
#[derive(Clone, Debug)]
pub struct View {
    /// Its name.
    pub name: Arc<str>,
    /// Whether it serves the model.
    pub serves: bool,
    /// Whether it takes requests.
    pub ready: bool,
    /// Whether it is about to go away.
    pub draining: bool,
    /// Whether its circuit is closed.
    pub circuit_closed: bool,
    /// Whether what it told is recent.
    pub fresh: bool,
    /// Longest sequence; 0 where it is not known.
    pub max_model_len: usize,
    /// Requests that it has.
    pub num_requests: usize,
    /// Requests that wait there.
    pub num_waiting: usize,
    /// Requests that it can run at once; 0 where it is not known.
    pub max_num_seqs: usize,
    /// Prompt tokens that it has still to compute.
    pub queued_tokens: f64,
    /// Prompt tokens a second; 0 where it is not known.
    pub prefill_tokens_per_s: f64,
    /// Seconds of a step.
    pub decode_step_s: f64,
    /// Bytes of text that a token stands for; 0 where it is not known.
    pub bytes_per_token: f64,
    /// Seconds from one request's end to the next, where all its places are taken; 0 where that is not known.
    pub seconds_a_place: f64,
    /// Part of its KV blocks that is in use.
    pub kv_used: f64,
    /// Tokens of the prompt that it holds.
    pub held_tokens: f64,
    /// Part of the prompt that it holds.
    pub held_share: f64,
    /// Requests of late, old ones counting less and less.
    pub recent_requests: f64,
    /// Its share of new prompts, beside others'.
    pub weight: usize,
}

/// What is asked.
#[derive(Clone, Debug, Default)]
pub struct Ask {
    /// Tokens of the prompt, about.
    pub num_tokens: f64,
    /// Longest answer, where one is given.
    pub max_tokens: usize,
    /// Workers, by place, in the order in which the ring gives them the prompt's beginning.
    pub walk: Vec<usize>,
    /// The worker, by place, that the session had last.
    pub session: Option<usize>,
    /// Decides between equals.
    pub seed: u64,
    /// How many requests came before.
    pub turn: u64,
}

/// A worker's scores.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scored {
    /// By place.
    pub place: usize,
    /// The sum, weighted.
    pub total: f64,
    /// By scorer, before the weights.
    pub parts: Vec<f64>,
}

/// The order in which workers are tried, and why.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// Best first.
    pub order: Vec<Scored>,
    /// Workers that are not tried, by place.
    pub refused: Vec<(usize, Refusal)>,
}

/// Puts the workers in order for a request.
pub fn pick(ask: &Ask, views: &[View], weights: &[Weight]) -> Decision {
    let (candidates, refused) = filter::filter(ask, views);
    let parts: Vec<Vec<f64>> = weights.iter().map(|weight| weight.scorer.score(ask, views, &candidates)).collect();
    let scored = |(index, &place): (usize, &usize)| {
        let parts: Vec<f64> = parts.iter().map(|scores| scores[index]).collect();
        let total = parts.iter().zip(weights).map(|(score, weight)| score * weight.weight).sum();
        Scored { place, total, parts }
    };
    let mut order: Vec<Scored> = candidates.iter().enumerate().map(scored).collect();
    let lot = |place: usize| XxHash3_64::oneshot_with_seed(ask.seed, &(place as u64).to_le_bytes());
    order.sort_unstable_by(|a, b| b.total.total_cmp(&a.total).then_with(|| lot(a.place).cmp(&lot(b.place))));
    Decision { order, refused }
}

/// A decision in words, for `x-pagoda-explain` and `pagoda explain`.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The winner; none where no worker is left.
    pub winner: Option<Arc<str>>,
    /// Tokens of the prompt, about.
    pub num_tokens: u64,
    /// Workers that were scored, best first.
    pub scores: Vec<ExplainedWorker>,
    /// Workers that were not, and why.
    pub filtered: Vec<(Arc<str>, Refusal)>,
}

/// A worker's scores by name.
#[derive(Clone, Debug, Serialize)]
pub struct ExplainedWorker {
    /// Its name.
    pub worker: Arc<str>,
    /// The sum, weighted.
    pub total: f64,
    /// By scorer: weight and score.
    pub parts: Vec<(Scorer, f64, f64)>,
    /// Tokens of the prompt that it holds.
    pub held_tokens: u64,
    /// Requests that it has.
    pub num_requests: usize,
}

impl Decision {
    /// In words.
    pub fn explain(&self, ask: &Ask, views: &[View], weights: &[Weight]) -> Explanation {
        let name = |place: usize| Arc::clone(&views[place].name);
        let worker = |scored: &Scored| ExplainedWorker {
            worker: name(scored.place),
            total: scored.total,
            parts: weights
                .iter()
                .zip(&scored.parts)
                .map(|(weight, &score)| (weight.scorer, weight.weight, score))
                .collect(),
            held_tokens: views[scored.place].held_tokens as u64,
            num_requests: views[scored.place].num_requests,
        };
        Explanation {
            winner: self.order.first().map(|scored| name(scored.place)),
            num_tokens: ask.num_tokens as u64,
            scores: self.order.iter().map(worker).collect(),
            filtered: self.refused.iter().map(|&(place, refusal)| (name(place), refusal)).collect(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
