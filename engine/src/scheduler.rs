//! Which sequences run in the next step, and how many tokens of each: iteration-level batching.
//!
//! Called by `Engine::step`; owns the queues and the block manager, and knows no GPU, clock or thread. Decodes first, one
//! token each, then prefill in chunks in order of arrival, within `max_num_batched_tokens`. A sequence starts when the
//! blocks of its prompt and `max_tokens` are free, so it never waits once it runs; the first that does not fit makes those
//! behind it wait.

use std::collections::VecDeque;

use crate::kv::BlockManager;
use crate::sequence::{RequestId, Sequence};

/// Bounds of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Tokens of a step.
    pub max_num_batched_tokens: usize,
}

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduled {
    /// The sequence.
    pub id: RequestId,
    /// Tokens to compute, from its first that is not.
    pub num_tokens: usize,
    /// Whether it is in decode.
    pub is_decode: bool,
}

/// The queues.
#[derive(Debug)]
pub struct Scheduler {
    limits: SchedulerLimits,
    blocks: BlockManager,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
}

impl Scheduler {
    /// An empty scheduler over all of `blocks`.
    pub fn new(limits: SchedulerLimits, blocks: BlockManager) -> Self {
        Self { limits, blocks, waiting: VecDeque::new(), running: Vec::new() }
    }

    /// Queues a sequence. Its request was checked at the door: it fits the empty pool.
    pub fn add(&mut self, sequence: Sequence) {
        debug_assert!(sequence.max_len() <= self.blocks.capacity_tokens());
        self.waiting.push_back(sequence);
    }

    /// Sequences that wait.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences that run.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// The pool.
    pub fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// A running sequence.
    pub fn sequence_mut(&mut self, id: RequestId) -> Option<&mut Sequence> {
        self.running.iter_mut().find(|sequence| sequence.id == id)
    }

    /// The next step, decodes first; admits waiting sequences as blocks allow.
    pub fn schedule(&mut self) -> Vec<Scheduled> {
        let mut budget = self.limits.max_num_batched_tokens;
        let mut batch = Vec::new();
        for is_decode in [true, false] {
            for sequence in self.running.iter().filter(|sequence| sequence.is_decoding() == is_decode) {
                push_chunk(&mut batch, sequence, &mut budget);
            }
        }
        while budget > 0 && self.running.len() < self.limits.max_num_seqs {
            let Some(table) = self.waiting.front().and_then(|next| self.blocks.allocate(next.max_len())) else { break };
            let Some(mut sequence) = self.waiting.pop_front() else { break };
            sequence.block_table = table;
            push_chunk(&mut batch, &sequence, &mut budget);
            self.running.push(sequence);
        }
        batch
    }

    /// Takes a sequence out, waiting or running, and frees its blocks. `None` where it is not here.
    pub fn remove(&mut self, id: RequestId) -> Option<Sequence> {
        if let Some(index) = self.waiting.iter().position(|sequence| sequence.id == id) {
            return self.waiting.remove(index);
        }
        let index = self.running.iter().position(|sequence| sequence.id == id)?;
        // Order is arrival, so it is kept.
        let mut sequence = self.running.remove(index);
        self.blocks.free(std::mem::take(&mut sequence.block_table));
        Some(sequence)
    }
}

fn push_chunk(batch: &mut Vec<Scheduled>, sequence: &Sequence, budget: &mut usize) {
    let num_tokens = sequence.num_pending_tokens().min(*budget);
    if num_tokens > 0 {
        *budget -= num_tokens;
        batch.push(Scheduled { id: sequence.id, num_tokens, is_decode: sequence.is_decoding() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling_params::SamplingParams;

    fn sequence(id: u64, prompt_len: usize, max_tokens: usize) -> Sequence {
        let params = SamplingParams { max_tokens, ..Default::default() };
        Sequence::new(RequestId(id), vec![1; prompt_len], params)
    }

    fn scheduler(num_blocks: usize, max_num_batched_tokens: usize) -> Scheduler {
        let limits = SchedulerLimits { max_num_seqs: 3, max_num_batched_tokens };
        Scheduler::new(limits, BlockManager::new(num_blocks, 16))
    }

    /// Does what the engine does after a step: marks tokens computed and appends one where the prompt is done.
    fn advance(scheduler: &mut Scheduler, batch: &[Scheduled]) {
        for scheduled in batch {
            let sequence = scheduler.sequence_mut(scheduled.id).unwrap();
            sequence.num_computed_tokens += scheduled.num_tokens;
            if sequence.num_pending_tokens() == 0 {
                sequence.tokens.push(1);
            }
        }
    }

    fn shares(batch: &[Scheduled]) -> Vec<(u64, usize)> {
        batch.iter().map(|scheduled| (scheduled.id.0, scheduled.num_tokens)).collect()
    }

    #[test]
    fn decodes_come_first_and_prefill_takes_the_rest_in_chunks() {
        let mut scheduler = scheduler(100, 8);
        scheduler.add(sequence(1, 3, 10));
        scheduler.add(sequence(2, 12, 10));
        let first = scheduler.schedule();
        assert_eq!(shares(&first), vec![(1, 3), (2, 5)]);
        advance(&mut scheduler, &first);
        let second = scheduler.schedule();
        assert_eq!(shares(&second), vec![(1, 1), (2, 7)]);
        advance(&mut scheduler, &second);
        assert_eq!(shares(&scheduler.schedule()), vec![(1, 1), (2, 1)]);
    }

    #[test]
    fn a_sequence_waits_until_its_whole_length_is_free() {
        let mut scheduler = scheduler(4, 100);
        scheduler.add(sequence(1, 20, 28));
        scheduler.add(sequence(2, 20, 28));
        scheduler.add(sequence(3, 1, 1));
        assert_eq!(shares(&scheduler.schedule()), vec![(1, 20)], "the third waits behind the second");
        assert_eq!((scheduler.num_running(), scheduler.num_waiting()), (1, 2));
        scheduler.remove(RequestId(1)).unwrap();
        assert_eq!(shares(&scheduler.schedule()), vec![(2, 20), (3, 1)]);
        scheduler.remove(RequestId(2)).unwrap();
        scheduler.remove(RequestId(3)).unwrap();
        assert_eq!(scheduler.blocks().num_free_blocks(), 4);
        assert!(scheduler.is_idle());
    }

    #[test]
    fn random_arrivals_and_departures_keep_the_books() {
        let mut scheduler = scheduler(12, 16);
        let mut state = 3u64;
        let mut alive: Vec<u64> = Vec::new();
        for id in 0..3_000u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let draw = (state >> 33) as usize;
            if !draw.is_multiple_of(3) {
                scheduler.add(sequence(id, 1 + draw % 50, 1 + draw % 20));
                alive.push(id);
            } else if !alive.is_empty() {
                let gone = alive.swap_remove(draw % alive.len());
                assert!(scheduler.remove(RequestId(gone)).is_some());
            }
            let batch = scheduler.schedule();
            assert!(batch.iter().map(|scheduled| scheduled.num_tokens).sum::<usize>() <= 16);
            let decodes = batch.iter().take_while(|scheduled| scheduled.is_decode).count();
            assert!(batch[decodes..].iter().all(|scheduled| !scheduled.is_decode), "decodes come first");
            advance(&mut scheduler, &batch);
            for finished in batch {
                let sequence = scheduler.sequence_mut(finished.id).unwrap();
                if sequence.num_generated() > sequence.params.max_tokens {
                    scheduler.remove(finished.id).unwrap();
                    alive.retain(|&id| id != finished.id.0);
                }
            }
            let held: usize = scheduler.running.iter().map(|sequence| sequence.block_table.block_ids().len()).sum();
            assert_eq!(held + scheduler.blocks.num_free_blocks(), 12);
        }
    }
}
