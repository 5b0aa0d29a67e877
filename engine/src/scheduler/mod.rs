//! Which sequences run in the next step, and how many tokens of each: iteration-level batching.
//!
//! Called by `Engine`; owns the queues and the block manager, and knows no GPU, clock or thread. Decodes first, one token
//! each, then prefill in chunks, then those that wait, each in order of priority and arrival. Blocks are taken as tokens
//! appear; when they run out, the last sequence in that order is preempted: its blocks are freed (those with a name can be
//! found again) and it waits in its old place. So the first in order always goes on, and a request that fits the empty pool
//! finishes.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::announcer::Announcement;
use crate::kv::{BlockCopies, BlockManager, BlockName, BlockTable, Load, Staged};
use crate::sequence::{RequestId, Sequence};
use protocol::BlockHash;

mod schedule;
#[cfg(test)]
mod tests;

pub use schedule::{Place, Schedule, Scheduled, Wanted};

/// Waiting sequences that a step passes over because their prefix is being computed: each costs a look-up of its prefix.
const MAX_HELD: usize = 16;

/// Blocks that arrive before one step: what a bus moves in a few milliseconds.
const MAX_LOADS: usize = 64;
/// Blocks that go down for a second use before one step: where nothing runs, and beside running sequences.
pub const MAX_STORES: usize = 32;
const MAX_STORES_BESIDE: usize = 4;

/// Bounds of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Tokens of a step.
    pub max_num_batched_tokens: usize,
    /// Rows of a step whose logits are computed; at least `max_num_seqs`, the rest is for prompt log probabilities.
    pub max_logits_rows: usize,
    /// Tokens of the contexts that one step's decodes read in all. Where sequences share blocks that is more than the pool
    /// holds, and a device's partial results grow with it.
    pub max_context_tokens: usize,
    /// Whether a sequence may start with cached blocks.
    pub enable_prefix_caching: bool,
    /// Whether there are tiers below the pool.
    pub has_tiers: bool,
}

/// Sums since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerCounters {
    /// Sequences that lost their blocks.
    pub num_preemptions: u64,
    /// Prompt tokens that were looked up in the cache.
    pub num_queried_tokens: u64,
    /// Prompt tokens that were found there.
    pub num_hit_tokens: u64,
    /// Tokens that the pool lacked and the tiers were asked for.
    pub num_asked_tokens: u64,
    /// Tokens that they had, and that were taken up.
    pub num_loaded_tokens: u64,
}

/// What is left of a step's bounds.
struct Left {
    tokens: usize,
    logits_rows: usize,
    loads: usize,
}

/// The queues.
#[derive(Debug)]
pub struct Scheduler {
    limits: SchedulerLimits,
    blocks: BlockManager,
    waiting: BTreeMap<Place, Sequence>,
    running: BTreeMap<Place, Sequence>,
    places: HashMap<RequestId, Place>,
    num_arrived: u64,
    counters: SchedulerCounters,
    /// Chunks whose blocks are held since this was last asked for; `None` where nobody asks.
    held_chunks: Option<Vec<Announcement>>,
}

impl Scheduler {
    /// An empty scheduler over all of `blocks`.
    pub fn new(limits: SchedulerLimits, mut blocks: BlockManager) -> Self {
        if limits.has_tiers {
            blocks.keep_stores();
        }
        let (waiting, running, places) = (BTreeMap::new(), BTreeMap::new(), HashMap::new());
        let counters = SchedulerCounters::default();
        Self { limits, blocks, waiting, running, places, num_arrived: 0, counters, held_chunks: None }
    }

    /// From now on what is held of prompt chains is told by [`Self::take_changes`].
    pub fn keep_changes(&mut self) {
        self.blocks.keep_forgotten();
        self.held_chunks.get_or_insert_default();
    }

    /// Names that blocks have lost since this was last called, then chunks that are held since then.
    pub fn take_changes(&mut self) -> (Vec<BlockHash>, Vec<Announcement>) {
        let held = self.held_chunks.as_mut().map(std::mem::take).unwrap_or_default();
        (self.blocks.take_forgotten(), held)
    }

    /// Queues a sequence. Its request was checked at the door: it fits the empty pool.
    pub fn add(&mut self, sequence: Sequence) {
        debug_assert!(sequence.max_len() <= self.blocks.capacity_tokens());
        let place = Place { priority: sequence.priority, arrival: self.num_arrived };
        self.num_arrived += 1;
        self.places.insert(sequence.id, place);
        self.waiting.insert(place, sequence);
    }

    /// Sequences that wait.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences that run.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that take one token a step.
    pub fn num_decoding(&self) -> usize {
        self.running.values().filter(|sequence| sequence.is_decoding()).count()
    }

    /// Tokens of waiting and running sequences that are to be computed in prefill.
    pub fn num_uncomputed_tokens(&self) -> usize {
        let left = |sequence: &Sequence| sequence.prefill_len.saturating_sub(sequence.num_computed_tokens);
        self.waiting.values().chain(self.running.values()).map(left).sum()
    }

    /// Token slots of held blocks that hold no token.
    pub fn num_wasted_slots(&self) -> usize {
        let block_size = self.blocks.block_size();
        let waste = |s: &Sequence| s.block_table.block_ids().len() * block_size - s.num_computed_tokens;
        self.running.values().map(waste).sum()
    }

    /// The pool.
    pub fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    /// Sums since the start.
    pub fn counters(&self) -> SchedulerCounters {
        self.counters
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.places.is_empty()
    }

    /// A waiting sequence.
    pub fn waiting(&self, id: RequestId) -> Option<&Sequence> {
        self.places.get(&id).and_then(|place| self.waiting.get(place))
    }

    /// A running sequence.
    pub fn running_mut(&mut self, place: Place) -> Option<&mut Sequence> {
        self.running.get_mut(&place)
    }

    /// The next step: all decodes, and at most `prefill_budget` tokens of prefill within the limits.
    pub fn schedule(&mut self, prefill_budget: usize) -> Schedule {
        let mut schedule = Schedule::default();
        let mut left = Left {
            tokens: self.limits.max_num_batched_tokens,
            logits_rows: self.limits.max_logits_rows,
            loads: MAX_LOADS,
        };
        let (decodes, prefills): (Vec<(Place, bool)>, _) = self
            .running
            .iter()
            .map(|(place, sequence)| (*place, sequence.is_decoding()))
            .partition(|(_, is_decoding)| *is_decoding);
        let mut contexts = 0;
        for (place, _) in decodes {
            contexts += self.running.get(&place).map_or(0, |sequence| sequence.tokens.len());
            // Contexts grow; those past the bound take turns with those that end before them. The first always goes on.
            let fits = contexts <= self.limits.max_context_tokens || schedule.batch.is_empty();
            if fits && self.make_room(place, &mut schedule) {
                self.share(place, 1, &mut left, &mut schedule);
            }
        }
        left.tokens = left.tokens.min(prefill_budget);
        for (place, _) in prefills {
            if left.tokens == 0 {
                break;
            }
            if self.load_staged(place, &mut left, &mut schedule) && self.make_room(place, &mut schedule) {
                self.share_chunk(place, &mut left, &mut schedule);
            }
        }
        // Blocks that were just taken from one are not handed to another, else the two would take turns.
        if schedule.preempted.is_empty() {
            self.admit(&mut left, &mut schedule);
        }
        // Streams leave less of the device's bandwidth idle.
        let max_written_through = if schedule.batch.is_empty() { MAX_STORES } else { MAX_STORES_BESIDE };
        schedule.copies.stores = self.blocks.take_stores(max_written_through);
        schedule
    }

    /// Gives a running sequence its next staged blocks. True where none are left, so that the rest may be computed.
    fn load_staged(&mut self, place: Place, left: &mut Left, schedule: &mut Schedule) -> bool {
        let Some(sequence) = self.running.get_mut(&place) else { return false };
        while left.loads > 0 && !sequence.staged.is_empty() {
            let Some(name) = sequence.block_name(sequence.block_table.block_ids().len()) else { break };
            let Some(block_id) = self.blocks.load(&mut sequence.block_table, name) else { break };
            let Some(block) = sequence.staged.pop() else { break };
            left.loads -= 1;
            sequence.num_computed_tokens += self.blocks.block_size();
            self.counters.num_loaded_tokens += self.blocks.block_size() as u64;
            schedule.copies.loads.push(Load { block_id, payload: block.payload });
        }
        // Where the pool is full, what is staged is not waited with: it is computed like the rest when blocks are free.
        if left.loads > 0 {
            sequence.drop_staged();
        }
        sequence.staged.is_empty()
    }

    /// Blocks that are used twice go down where nothing runs.
    pub fn idle_copies(&mut self) -> BlockCopies {
        BlockCopies { stores: self.blocks.take_stores(MAX_STORES), loads: Vec::new() }
    }

    /// The next blocks of a drain, the most valuable first.
    pub fn drain_copies(&mut self) -> BlockCopies {
        BlockCopies { stores: self.blocks.drain(MAX_STORES), loads: Vec::new() }
    }

    /// Hands a sequence that is held back what arrived for it; `is_last` lets it go on.
    pub fn stage(&mut self, id: RequestId, blocks: Vec<crate::kv::StagedBlock>, is_last: bool) {
        let Some(sequence) = self.places.get(&id).and_then(|place| self.waiting.get_mut(place)) else { return };
        sequence.staged.push(blocks);
        if is_last {
            sequence.staged.close();
        }
    }

    /// Makes room for one more token of a running sequence, preempting from the end. False where it runs no longer, or
    /// where it is in prefill, the last, and has to wait for blocks.
    fn make_room(&mut self, place: Place, schedule: &mut Schedule) -> bool {
        loop {
            let Some(sequence) = self.running.get_mut(&place) else { return false };
            if self.blocks.grow(&mut sequence.block_table, sequence.num_computed_tokens + 1) {
                return true;
            }
            let is_decoding = sequence.is_decoding();
            let Some((&last, _)) = self.running.last_key_value() else { return false };
            if last == place && !is_decoding {
                return false;
            }
            self.preempt(last, schedule);
            if last == place {
                return false;
            }
        }
    }

    /// Takes a running sequence's blocks, and its share of this step if it has one; it waits in its old place.
    fn preempt(&mut self, place: Place, schedule: &mut Schedule) {
        let Some(mut sequence) = self.running.remove(&place) else { return };
        sequence.drop_staged();
        self.blocks.set_preempted(&sequence.block_table);
        self.blocks.free(std::mem::take(&mut sequence.block_table));
        // What was evicted meanwhile may be found below when it resumes.
        sequence.staged = Staged::Unasked;
        sequence.tell_chunks_again();
        sequence.num_computed_tokens = 0;
        sequence.prefill_len = sequence.tokens.len();
        schedule.batch.retain(|scheduled| scheduled.place != place);
        schedule.preempted.push(sequence.id);
        self.counters.num_preemptions += 1;
        self.waiting.insert(place, sequence);
    }

    /// Gives a running sequence in prefill as many tokens as blocks and bounds allow.
    fn share_chunk(&mut self, place: Place, left: &mut Left, schedule: &mut Schedule) {
        let Some(sequence) = self.running.get_mut(&place) else { return };
        let room = self.blocks.room(&sequence.block_table) - sequence.num_computed_tokens;
        let mut num_tokens = sequence.num_pending_tokens().min(left.tokens).min(room);
        if sequence.wants_prompt_logprobs() {
            // Each other sequence that may still come needs a row.
            let others = self.limits.max_num_seqs.saturating_sub(schedule.batch.len() + 1);
            num_tokens = num_tokens.min(left.logits_rows.saturating_sub(others));
        }
        let end = sequence.num_computed_tokens + num_tokens;
        if num_tokens > 0 && self.blocks.grow(&mut sequence.block_table, end) {
            self.share(place, num_tokens, left, schedule);
        }
    }

    fn share(&self, place: Place, num_tokens: usize, left: &mut Left, schedule: &mut Schedule) {
        let Some(sequence) = self.running.get(&place) else { return };
        let rows = if sequence.wants_prompt_logprobs() { num_tokens } else { 1 };
        left.tokens = left.tokens.saturating_sub(num_tokens);
        left.logits_rows = left.logits_rows.saturating_sub(rows);
        let is_decode = sequence.is_decoding();
        schedule.batch.push(Scheduled { id: sequence.id, place, num_tokens, is_decode });
    }

    /// Starts waiting sequences, in order; the first that does not fit makes those behind it wait.
    fn admit(&mut self, left: &mut Left, schedule: &mut Schedule) {
        let mut promised: usize = self.running.values().map(|sequence| self.missing_blocks(sequence)).sum();
        let places: Vec<Place> = self.waiting.keys().copied().take(self.limits.max_num_seqs).collect();
        let mut num_held = 0;
        for place in places {
            if left.tokens == 0 || self.running.len() >= self.limits.max_num_seqs {
                return;
            }
            let hashes = self.cacheable_hashes(place);
            let cached = self.blocks.cached_prefix(hashes);
            let is_being_computed = self.is_being_computed(place, hashes, cached.num_blocks);
            if !is_being_computed && self.is_held_for_tiers(place, cached.num_blocks, schedule) {
                continue;
            }
            if is_being_computed {
                num_held += 1;
                if num_held == MAX_HELD {
                    return;
                }
                continue;
            }
            let Some(next) = self.waiting.get(&place) else { return };
            let contexts: usize = self.running.values().map(|sequence| sequence.tokens.len()).sum();
            if !self.running.is_empty() && contexts + next.tokens.len() > self.limits.max_context_tokens {
                return;
            }
            let needed = self.blocks.blocks_of(next.tokens.len()) - cached.num_blocks + cached.num_free;
            // What stays free lets running sequences grow; the only sequence needs no such margin.
            let watermark = if self.running.is_empty() { 0 } else { self.blocks.num_blocks().div_ceil(100) };
            if needed + promised + watermark > self.blocks.num_free_blocks() {
                return;
            }
            let Some(mut sequence) = self.waiting.remove(&place) else { return };
            let table = self.blocks.start(&sequence.cacheable_hashes()[..cached.num_blocks]);
            self.start(&mut sequence, table);
            promised += self.missing_blocks(&sequence);
            schedule.admitted.push(sequence.id);
            self.running.insert(place, sequence);
            if self.load_staged(place, left, schedule) {
                self.share_chunk(place, left, schedule);
            }
        }
    }

    /// The blocks that a waiting sequence may start with.
    fn cacheable_hashes(&self, place: Place) -> &[BlockHash] {
        match self.waiting.get(&place) {
            Some(next) if self.limits.enable_prefix_caching => next.cacheable_hashes(),
            _ => &[],
        }
    }

    /// Whether a waiting sequence is held back for blocks from the tiers, which are asked once each time it waits.
    fn is_held_for_tiers(&mut self, place: Place, num_cached: usize, schedule: &mut Schedule) -> bool {
        let Some(sequence) = self.waiting.get_mut(&place).filter(|_| self.limits.has_tiers) else { return false };
        if !matches!(sequence.staged, Staged::Unasked) {
            return sequence.staged.is_arriving();
        }
        let num_wanted = sequence.cacheable_hashes().len();
        if num_wanted <= num_cached {
            return false;
        }
        // Who would fetch what another is fetching waits for it.
        let next = sequence.block_hashes()[num_cached];
        // One that wants more would be waited for longer than these blocks are worth.
        let is_next = |other: &Sequence| {
            other.cacheable_hashes().len() <= num_wanted && other.block_hashes().get(num_cached) == Some(&next)
        };
        if self.waiting.range(..place).any(|(_, other)| other.staged.is_arriving() && is_next(other)) {
            return true;
        }
        let Some(sequence) = self.waiting.get_mut(&place) else { return false };
        let blocks: Vec<BlockName> = (num_cached..num_wanted).map_while(|index| sequence.block_name(index)).collect();
        sequence.staged = Staged::Arriving(num_cached, VecDeque::new());
        self.counters.num_asked_tokens += (blocks.len() * self.blocks.block_size()) as u64;
        schedule.wanted.push(Wanted { id: sequence.id, blocks });
        true
    }

    fn start(&mut self, sequence: &mut Sequence, table: BlockTable) {
        let num_cached = table.block_ids().len() * self.blocks.block_size();
        sequence.block_table = table;
        sequence.num_computed_tokens = num_cached;
        sequence.prefill_len = sequence.tokens.len();
        sequence.staged.cut(num_cached / self.blocks.block_size());
        if sequence.num_cached_tokens.is_none() {
            let num_staged = sequence.staged.len() * self.blocks.block_size();
            // One that goes on elsewhere may find its own tokens too: they are no part of the prompt.
            sequence.num_cached_tokens = Some((num_cached + num_staged).min(sequence.prompt_len));
            if self.limits.enable_prefix_caching {
                self.counters.num_queried_tokens += sequence.prompt_len as u64;
                self.counters.num_hit_tokens += num_cached.min(sequence.prompt_len) as u64;
            }
        }
    }

    /// Blocks that a running sequence's prefill has still to take.
    fn missing_blocks(&self, sequence: &Sequence) -> usize {
        self.blocks.blocks_of(sequence.prefill_len).saturating_sub(sequence.block_table.block_ids().len())
    }

    /// Whether a running sequence that goes before `place` is about to fill the next block that one with these names needs:
    /// who waits for it finds the block in the cache, so that a prompt that several ask for at once is computed once. One
    /// that wants the log probabilities of its prompt is too slow to be waited for.
    fn is_being_computed(&self, place: Place, hashes: &[BlockHash], num_cached: usize) -> bool {
        let Some(wanted) = hashes.get(num_cached) else { return false };
        let end = (num_cached + 1) * self.blocks.block_size();
        self.running.range(..place).any(|(_, sequence)| {
            !sequence.wants_prompt_logprobs()
                && sequence.num_computed_tokens < end
                && end <= sequence.prefill_len
                && sequence.block_hashes().get(num_cached) == Some(wanted)
        })
    }

    /// Notes that a step has computed a share: the blocks that it filled get their names.
    pub fn computed(&mut self, scheduled: &Scheduled) -> Option<&mut Sequence> {
        let sequence = self.running.get_mut(&scheduled.place)?;
        sequence.num_computed_tokens += scheduled.num_tokens;
        if self.limits.enable_prefix_caching {
            let mut table = std::mem::take(&mut sequence.block_table);
            let name_of = |index| sequence.block_name(index);
            self.blocks.name_full_blocks(&mut table, sequence.num_computed_tokens, name_of);
            sequence.block_table = table;
            if let Some(held) = &mut self.held_chunks {
                let num_named = self.blocks.num_named(&sequence.block_table);
                held.extend(std::iter::from_fn(|| sequence.next_held_chunk(num_named)));
            }
        }
        Some(sequence)
    }

    /// Takes a running sequence out whose blocks must not be found again: what it computed is NaN.
    pub fn remove_poisoned(&mut self, id: RequestId) {
        let table =
            self.places.get(&id).and_then(|place| self.running.get(place)).map(|sequence| &sequence.block_table);
        if let Some(table) = table {
            self.blocks.forget_names(table);
        }
        self.remove(id);
    }

    /// Takes a sequence out, waiting or running, and frees its blocks. `None` where it is not here.
    pub fn remove(&mut self, id: RequestId) -> Option<Sequence> {
        let place = self.places.remove(&id)?;
        if let Some(sequence) = self.waiting.remove(&place) {
            return Some(sequence);
        }
        let mut sequence = self.running.remove(&place)?;
        self.blocks.free(std::mem::take(&mut sequence.block_table));
        Some(sequence)
    }
}
