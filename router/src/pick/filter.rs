//! Which workers may take a request at all.
//!
//! Called by `pick`. Invariant: a worker that is only suspect (silent of late) is taken where no other is left, so that a lost
//! event stream slows no request down to nothing.

use serde::Serialize;

use super::{Ask, View};

/// Why a worker is not asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Refusal {
    /// It serves other models.
    OtherModel,
    /// It does not take requests.
    NotReady,
    /// It is about to go away.
    Draining,
    /// It failed of late.
    CircuitOpen,
    /// Prompt and answer are longer than its sequences.
    TooLong,
    /// It has been silent, and others have not.
    Stale,
}

/// Places of the workers that may take the request, and why the others may not.
pub(super) fn filter(ask: &Ask, views: &[View]) -> (Vec<usize>, Vec<(usize, Refusal)>) {
    let (mut candidates, mut stale, mut refused) = (Vec::with_capacity(views.len()), Vec::new(), Vec::new());
    for (place, view) in views.iter().enumerate() {
        match refusal(ask, view) {
            Some(Refusal::Stale) => stale.push(place),
            Some(refusal) => refused.push((place, refusal)),
            None => candidates.push(place),
        }
    }
    if candidates.is_empty() {
        return (stale, refused);
    }
    refused.extend(stale.into_iter().map(|place| (place, Refusal::Stale)));
    (candidates, refused)
}

fn refusal(ask: &Ask, view: &View) -> Option<Refusal> {
    // The router's count is a guess: a worker is passed over only where it is far too short, the rest it tells itself.
    let is_too_long =
        view.max_model_len > 0 && ask.num_tokens * 0.5 + ask.max_tokens as f64 > view.max_model_len as f64;
    [
        (!view.serves, Refusal::OtherModel),
        (view.draining, Refusal::Draining),
        (!view.ready, Refusal::NotReady),
        (!view.circuit_closed, Refusal::CircuitOpen),
        (is_too_long, Refusal::TooLong),
        (!view.fresh, Refusal::Stale),
    ]
    .into_iter()
    .find_map(|(holds, refusal)| holds.then_some(refusal))
}
