//! The choice itself, among many workers.

use std::time::Instant;

use protocol::HeldChunk;
use protocol::prompt_chain::Chunk;
use router::index::Index;
use router::pick::{Ask, View, pick};
use router::policies::Preset;
use router::ring::{Ring, RingWorker};

/// Choosing among so many workers for a prompt, of which some hold parts.
pub fn pick_among(count: usize, chain: &[Chunk], held: impl Fn(&[Chunk]) -> Vec<HeldChunk>) {
    let index = Index::new(usize::MAX);
    for worker in 0..count {
        index.store(worker as u16, &held(&chain[..chain.len() * (worker + 1) / count]));
    }
    let worker = |place: usize| RingWorker { name: format!("worker-{place}"), place, weight: 1 };
    let ring = Ring::new((0..count).map(worker).collect());
    let view = |place: usize| View {
        name: format!("worker-{place}").into(),
        serves: true,
        ready: true,
        draining: false,
        circuit_closed: true,
        fresh: true,
        max_model_len: 131_072,
        num_requests: place % 7,
        num_waiting: 0,
        max_num_seqs: 64,
        queued_tokens: (place % 13) as f64 * 1000.0,
        prefill_tokens_per_s: 10_000.0,
        decode_step_s: 0.02,
        seconds_a_place: 0.1,
        kv_used: 0.5,
        held_tokens: 0.0,
        held_share: 0.0,
        recent_requests: (place % 7) as f64,
        weight: 1,
    };
    let views: Vec<View> = (0..count).map(view).collect();
    let weights = Preset::Pagoda.weights();
    let mut times = Vec::new();
    for round in 0..200 {
        let mut views = views.clone();
        let started = Instant::now();
        for held in index.held(chain) {
            let view = &mut views[usize::from(held.slot)];
            view.held_tokens = f64::from(held.num_tokens);
            view.held_share = held.num_chunks as f64 / chain.len() as f64;
        }
        let walk = ring.walk(round).take(16).collect();
        let ask = Ask { num_tokens: 100_000.0, walk, seed: round, ..Default::default() };
        let decision = pick(&ask, &views, &weights);
        times.push(started.elapsed().as_secs_f64());
        assert_eq!(decision.order.len(), count);
    }
    times.sort_by(f64::total_cmp);
    println!(
        "pick: {count} workers, {} chunks of a prompt of 100,000 tokens: {:.2} ms median, {:.2} ms p99",
        chain.len(),
        times[100] * 1e3,
        times[197] * 1e3
    );
}
