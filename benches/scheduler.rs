//! What deciding costs: a step's scheduling at 256 sequences over 100,000 blocks, and looking a long prefix up.

use divan::Bencher;
use engine::kv::{BLOCK_SIZE, BlockManager, BlockName, BlockTable};
use engine::sampling_params::SamplingParams;
use engine::scheduler::{Scheduler, SchedulerLimits};
use engine::sequence::{EngineRequest, RequestId, Sequence};
use protocol::{BlockHash, Salt};

const NUM_BLOCKS: usize = 100_000;
const NUM_SEQS: usize = 256;

fn main() {
    divan::main();
}

/// A scheduler whose 256 sequences are all in decode, some 500 tokens long, with as many waiting.
fn busy() -> Scheduler {
    let limits = SchedulerLimits {
        max_num_seqs: NUM_SEQS,
        max_num_batched_tokens: 1 << 20,
        max_logits_rows: NUM_SEQS,
        max_context_tokens: usize::MAX,
        enable_prefix_caching: true,
        has_tiers: false,
    };
    let mut scheduler = Scheduler::new(limits, BlockManager::new(NUM_BLOCKS, BLOCK_SIZE));
    for id in 0..2 * NUM_SEQS as u64 {
        let params = SamplingParams { max_tokens: 1 << 16, ..Default::default() };
        let request = EngineRequest { prompt: vec![id as u32; 300 + id as usize], params, ..Default::default() };
        scheduler.add(Sequence::new(RequestId(id), request, BLOCK_SIZE));
    }
    step(&mut scheduler);
    assert_eq!(scheduler.num_running(), NUM_SEQS);
    scheduler
}

/// A step's deciding: what is scheduled, and what it leaves behind.
fn step(scheduler: &mut Scheduler) {
    let schedule = scheduler.schedule(usize::MAX);
    for scheduled in &schedule.batch {
        if let Some(sequence) = scheduler.computed(scheduled) {
            sequence.push(7);
        }
    }
}

#[divan::bench]
fn step_of_256_sequences(bencher: Bencher<'_, '_>) {
    let mut scheduler = busy();
    bencher.bench_local(|| step(&mut scheduler));
}

#[divan::bench]
fn lookup_of_a_100_000_token_prefix(bencher: Bencher<'_, '_>) {
    let mut blocks = BlockManager::new(NUM_BLOCKS, BLOCK_SIZE);
    let tokens: Vec<u32> = (0..100_000).collect();
    let root = BlockHash::root(&Salt::default());
    let hashes = root.chain(&tokens, BLOCK_SIZE);
    let mut table = BlockTable::default();
    assert!(blocks.grow(&mut table, tokens.len()));
    let name_of = |index: usize| {
        let parent = if index == 0 { root } else { hashes[index - 1] };
        let token_ids = tokens[index * BLOCK_SIZE..][..BLOCK_SIZE].into();
        Some(BlockName { hash: hashes[index], parent, token_ids })
    };
    blocks.name_full_blocks(&mut table, tokens.len(), name_of);
    // Naming the tokens is part of looking them up.
    bencher.bench_local(|| {
        let cached = blocks.cached_prefix(&root.chain(&tokens, BLOCK_SIZE));
        assert_eq!(cached.num_blocks, tokens.len() / BLOCK_SIZE);
    });
}
