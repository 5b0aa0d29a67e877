//! Filters, ties and explanations, as tables.

use super::*;
use crate::policies::Preset;

/// An idle worker that can take anything.
pub(crate) fn idle(name: &str) -> View {
    View {
        name: name.into(),
        serves: true,
        ready: true,
        draining: false,
        circuit_closed: true,
        fresh: true,
        max_model_len: 1000,
        num_requests: 0,
        num_waiting: 0,
        max_num_seqs: 8,
        queued_tokens: 0.0,
        prefill_tokens_per_s: 1000.0,
        decode_step_s: 0.01,
        bytes_per_token: 4.0,
        seconds_a_place: 0.0,
        kv_used: 0.0,
        held_tokens: 0.0,
        held_share: 0.0,
        recent_requests: 0.0,
        weight: 1,
    }
}

#[test]
fn workers_that_cannot_take_a_request_are_named_with_the_reason() {
    let views = [
        View { serves: false, ..idle("a") },
        View { ready: false, ..idle("b") },
        View { draining: true, ready: false, ..idle("c") },
        View { circuit_closed: false, ..idle("d") },
        View { max_model_len: 100, ..idle("e") },
        View { fresh: false, ..idle("f") },
        idle("g"),
    ];
    let ask = Ask { num_tokens: 120.0, max_tokens: 50, ..Default::default() };
    let decision = pick(&ask, &views, &Preset::LeastLoad.weights());
    assert_eq!(decision.order.iter().map(|scored| scored.place).collect::<Vec<_>>(), [6]);
    let expected = [
        (0, Refusal::OtherModel),
        (1, Refusal::NotReady),
        (2, Refusal::Draining),
        (3, Refusal::CircuitOpen),
        (4, Refusal::TooLong),
        (5, Refusal::Stale),
    ];
    assert_eq!(decision.refused, expected);
    // Where no other is left, one that is silent is asked.
    let decision = pick(&ask, &views[..6], &Preset::LeastLoad.weights());
    assert_eq!(decision.order[0].place, 5);
    assert!(pick(&ask, &[], &Preset::Pagoda.weights()).order.is_empty());
}

#[test]
fn ties_fall_by_the_seed_and_spread() {
    let views: Vec<View> = (0..8).map(|number| idle(&number.to_string())).collect();
    let mut counts = [0usize; 8];
    for seed in 0..8000 {
        let ask = Ask { seed, ..Default::default() };
        let decision = pick(&ask, &views, &Preset::LeastLoad.weights());
        assert_eq!(decision, pick(&ask, &views, &Preset::LeastLoad.weights()));
        counts[decision.order[0].place] += 1;
    }
    assert!(counts.iter().all(|&count| (850..1150).contains(&count)), "{counts:?}");
}

#[test]
fn an_explanation_names_filters_scores_and_winner() {
    let views = [View { num_requests: 3, ..idle("busy") }, idle("free"), View { serves: false, ..idle("other") }];
    let (ask, weights) = (Ask { num_tokens: 64.0, ..Default::default() }, Preset::LeastLoad.weights());
    let explanation = pick(&ask, &views, &weights).explain(&ask, &views, &weights);
    let json = serde_json::to_value(&explanation).unwrap();
    assert_eq!(json["winner"], "free");
    assert_eq!(json["filtered"], serde_json::json!([["other", "other-model"]]));
    assert_eq!(json["scores"][1]["worker"], "busy");
    assert_eq!(json["scores"][0]["parts"][0][0], "least-load");
}

#[test]
fn a_hot_prefix_spreads_as_its_load_grows_and_shrinks_back() {
    let ask = |seed| Ask { num_tokens: 2000.0, walk: (0..8).collect(), seed, ..Default::default() };
    let weights = Preset::Pagoda.weights();
    // One worker holds nearly all of the prompt; requests come faster than it answers them.
    let mut views: Vec<View> = (0..8).map(|number| idle(&number.to_string())).collect();
    (views[3].held_tokens, views[3].held_share) = (1950.0, 0.97);
    let mut holders = std::collections::BTreeSet::from([3]);
    let mut first_elsewhere = None;
    for request in 0..400 {
        let place = pick(&ask(request), &views, &weights).order[0].place;
        if place != 3 {
            first_elsewhere.get_or_insert(request);
        }
        let view = &mut views[place];
        view.queued_tokens += 2000.0 - view.held_tokens;
        view.num_requests += 1;
        view.recent_requests += 1.0;
        (view.held_tokens, view.held_share) = (1950.0, 0.97);
        holders.insert(place);
    }
    assert!(first_elsewhere.is_some_and(|first| first > 4), "some load is no reason: {first_elsewhere:?}");
    assert!(holders.len() >= 3, "{holders:?}");
    // The load is gone, and with it what was spread is evicted: one is enough again.
    for (place, view) in views.iter_mut().enumerate() {
        *view = idle(&place.to_string());
    }
    (views[5].held_tokens, views[5].held_share) = (1950.0, 0.97);
    assert!((0..50).all(|seed| pick(&ask(seed), &views, &weights).order[0].place == 5));
}
