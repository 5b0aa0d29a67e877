//! The scheduler by hand and under random operations.

use std::collections::HashMap;

use super::*;
use crate::sampling_params::SamplingParams;
use crate::sequence::EngineRequest;

mod tiers;

const ALL: usize = usize::MAX;

fn sequence(id: u64, prompt: Vec<u32>, max_tokens: usize) -> Sequence {
    prioritised(id, prompt, max_tokens, 0)
}

fn prioritised(id: u64, prompt: Vec<u32>, max_tokens: usize, priority: i32) -> Sequence {
    let params = SamplingParams { max_tokens, ..Default::default() };
    Sequence::new(RequestId(id), EngineRequest { prompt, params, priority, ..Default::default() }, 16)
}

/// A prompt that shares no block with that of another number.
fn own(number: u32, len: usize) -> Vec<u32> {
    vec![number; len]
}

fn scheduler(num_blocks: usize, max_num_batched_tokens: usize) -> Scheduler {
    let limits = SchedulerLimits {
        max_num_seqs: 4,
        max_num_batched_tokens,
        max_logits_rows: 8,
        max_context_tokens: usize::MAX,
        enable_prefix_caching: true,
        has_tiers: false,
    };
    Scheduler::new(limits, BlockManager::new(num_blocks, 16))
}

/// Does what the engine does after a step: marks tokens computed and appends one where nothing is pending.
fn advance(scheduler: &mut Scheduler, schedule: &Schedule, token: u32) {
    for scheduled in &schedule.batch {
        let sequence = scheduler.computed(scheduled).unwrap();
        if sequence.num_pending_tokens() == 0 {
            sequence.push(token);
        }
    }
}

fn shares(schedule: &Schedule) -> Vec<(u64, usize)> {
    schedule.batch.iter().map(|scheduled| (scheduled.id.0, scheduled.num_tokens)).collect()
}

fn step(scheduler: &mut Scheduler) -> Schedule {
    let schedule = scheduler.schedule(ALL);
    advance(scheduler, &schedule, 1);
    schedule
}

#[test]
fn decodes_come_first_and_prefill_takes_the_rest_in_chunks() {
    let mut scheduler = scheduler(100, 8);
    scheduler.add(sequence(1, own(1, 3), 10));
    scheduler.add(sequence(2, own(2, 12), 10));
    assert_eq!(shares(&step(&mut scheduler)), vec![(1, 3), (2, 5)]);
    assert_eq!(shares(&step(&mut scheduler)), vec![(1, 1), (2, 7)]);
    assert_eq!(shares(&step(&mut scheduler)), vec![(1, 1), (2, 1)]);
}

#[test]
fn the_prefill_budget_bounds_prefill_alone() {
    let mut scheduler = scheduler(100, 64);
    scheduler.add(sequence(1, own(1, 3), 10));
    scheduler.add(sequence(2, own(2, 40), 10));
    let first = scheduler.schedule(3);
    assert_eq!(shares(&first), vec![(1, 3)]);
    advance(&mut scheduler, &first, 1);
    assert_eq!(shares(&scheduler.schedule(20)), vec![(1, 1), (2, 20)]);
    assert_eq!(shares(&scheduler.schedule(0)), vec![(1, 1)]);
}

#[test]
fn blocks_are_taken_as_tokens_appear() {
    let mut scheduler = scheduler(100, 10);
    scheduler.add(sequence(1, own(1, 20), 100));
    step(&mut scheduler);
    assert_eq!((scheduler.blocks().num_free_blocks(), scheduler.num_wasted_slots()), (99, 6));
    step(&mut scheduler);
    assert_eq!((scheduler.blocks().num_free_blocks(), scheduler.num_wasted_slots()), (98, 12));
}

#[test]
fn priority_goes_before_arrival() {
    let mut scheduler = scheduler(100, 64);
    scheduler.add(sequence(1, own(1, 40), 10));
    scheduler.add(prioritised(2, own(2, 40), 10, -1));
    assert_eq!(shares(&step(&mut scheduler)), vec![(2, 40), (1, 24)]);
}

#[test]
fn a_shared_prefix_is_computed_once_and_held_once() {
    let mut scheduler = scheduler(100, 64);
    let prompt: Vec<u32> = (0..40).collect();
    scheduler.add(sequence(1, prompt.clone(), 10));
    scheduler.add(sequence(2, prompt.clone(), 10));
    assert_eq!(shares(&step(&mut scheduler)), vec![(1, 40)], "the second waits for the first to fill the blocks");
    let second = step(&mut scheduler);
    assert_eq!(shares(&second), vec![(1, 1), (2, 8)]);
    assert_eq!(scheduler.blocks().num_free_blocks(), 96, "two blocks shared, a tail each");
    let cached = scheduler.remove(RequestId(2)).unwrap().num_cached_tokens;
    assert_eq!(cached, Some(32));
    scheduler.remove(RequestId(1)).unwrap();
    assert_eq!(scheduler.blocks().num_free_blocks(), 100);
    scheduler.add(sequence(3, prompt[..32].to_vec(), 10));
    assert_eq!(shares(&step(&mut scheduler)), vec![(3, 16)], "a hit never covers the whole prompt");
    let counters = scheduler.counters();
    assert_eq!((counters.num_queried_tokens, counters.num_hit_tokens), (112, 48));
}

#[test]
fn salts_keep_prefixes_apart() {
    let mut scheduler = scheduler(100, 64);
    for (id, salt) in [(1, "a"), (2, "b"), (3, "a")] {
        let params = SamplingParams { max_tokens: 10, ..Default::default() };
        let request = EngineRequest { prompt: own(1, 40), params, cache_salt: salt.into(), ..Default::default() };
        scheduler.add(Sequence::new(RequestId(id), request, 16));
        let tokens = step(&mut scheduler).batch[0].num_tokens;
        assert_eq!(tokens, if id == 3 { 8 } else { 40 });
        scheduler.remove(RequestId(id)).unwrap();
    }
}

#[test]
fn the_newest_of_the_lowest_priority_is_preempted_and_resumes_where_it_was() {
    let mut scheduler = scheduler(6, 200);
    scheduler.add(sequence(1, own(1, 31), 64));
    scheduler.add(sequence(2, own(2, 31), 64));
    step(&mut scheduler);
    let mut preempted = Vec::new();
    for _ in 0..40 {
        preempted.extend(step(&mut scheduler).preempted);
    }
    assert_eq!(preempted, vec![RequestId(2)]);
    assert_eq!((scheduler.num_running(), scheduler.num_waiting()), (1, 1), "no room for both: one waits, none is lost");
    // While it waits, requests behind it wait as well.
    scheduler.add(sequence(3, own(3, 1), 1));
    assert_eq!(shares(&step(&mut scheduler)), vec![(1, 1)]);
    scheduler.remove(RequestId(1)).unwrap();
    let resumed = step(&mut scheduler);
    assert_eq!(resumed.admitted, vec![RequestId(2)], "the last free block is the margin in which it grows");
    let second = scheduler.remove(RequestId(2)).unwrap();
    assert!(second.num_generated() > 15, "what it had generated was kept");
    assert_eq!(second.num_cached_tokens, Some(0), "its own blocks are no hit of the prompt");
}

#[test]
fn the_higher_priority_keeps_its_blocks_though_it_came_later() {
    let mut scheduler = scheduler(8, 64);
    scheduler.add(sequence(2, own(2, 62), 60));
    step(&mut scheduler);
    scheduler.add(prioritised(1, own(1, 40), 80, -1));
    assert_eq!(shares(&step(&mut scheduler)), vec![(2, 1), (1, 40)]);
    let last = (0..80).find_map(|_| {
        let schedule = step(&mut scheduler);
        (!schedule.preempted.is_empty()).then_some(schedule)
    });
    let last = last.unwrap();
    assert_eq!(last.preempted, vec![RequestId(2)]);
    assert_eq!(shares(&last), vec![(1, 1)], "the preempted has no share");
}

#[test]
fn prompt_logprobs_take_no_more_rows_than_there_are() {
    let mut scheduler = scheduler(100, 64);
    let params = SamplingParams { prompt_logprobs: Some(0), ..Default::default() };
    let request = EngineRequest { prompt: own(1, 20), params, ..Default::default() };
    scheduler.add(Sequence::new(RequestId(1), request, 16));
    scheduler.add(sequence(2, own(2, 3), 4));
    assert_eq!(shares(&step(&mut scheduler)), vec![(1, 5), (2, 3)], "8 rows, 3 of them for others");
}

#[test]
fn what_a_nan_has_touched_is_not_found_again() {
    let mut scheduler = scheduler(100, 64);
    let prompt: Vec<u32> = (0..60).collect();
    scheduler.add(sequence(1, prompt.clone(), 10));
    step(&mut scheduler);
    scheduler.remove_poisoned(RequestId(1));
    assert_eq!((scheduler.blocks().num_free_blocks(), scheduler.blocks().num_cached_blocks()), (100, 0));
    scheduler.add(sequence(2, prompt, 10));
    assert_eq!(shares(&step(&mut scheduler)), vec![(2, 60)]);
}

#[test]
fn contexts_in_all_stay_within_their_bound_though_blocks_are_shared() {
    let mut scheduler = scheduler(100, 640);
    scheduler.limits.max_context_tokens = 130;
    let prompt: Vec<u32> = (0..40).collect();
    (1..=4).for_each(|id| scheduler.add(sequence(id, prompt.clone(), 40)));
    step(&mut scheduler);
    assert_eq!(shares(&step(&mut scheduler)), vec![(1, 1), (2, 8), (3, 8)], "three of some 40 tokens each");
    let last = (0..6).map(|_| step(&mut scheduler)).last().unwrap();
    assert_eq!(shares(&last), vec![(1, 1), (2, 1)], "the third waits until contexts are fewer");
    scheduler.remove(RequestId(1)).unwrap();
    assert_eq!(shares(&step(&mut scheduler))[..2], [(2, 1), (3, 1)]);
}

#[test]
fn nobody_waits_for_a_prefix_that_someone_behind_computes() {
    let mut scheduler = scheduler(100, 16);
    let prompt: Vec<u32> = (0..64).collect();
    scheduler.add(prioritised(1, prompt.clone(), 10, 5));
    step(&mut scheduler);
    scheduler.add(prioritised(2, prompt, 10, 0));
    scheduler.limits.max_num_batched_tokens = 64;
    assert_eq!(step(&mut scheduler).admitted, vec![RequestId(2)]);
}

/// Prompts over two tokens, so that prefixes are shared all the time; a small pool, so that preemption is common.
#[test]
fn random_operations_keep_the_books() {
    let mut scheduler = scheduler(12, 32);
    let mut state = 3u64;
    let mut draw = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut max_tokens: HashMap<u64, usize> = HashMap::new();
    let (mut finished, mut cached) = (0, 0);
    for id in 0..20_000u64 {
        if draw(3) == 0 && scheduler.num_waiting() < 20 {
            let prompt = (0..1 + draw(90)).map(|_| u32::from(draw(24) == 0)).collect();
            let tokens = 1 + draw(60);
            let priority = draw(3) as i32 - 1;
            max_tokens.insert(id, tokens);
            scheduler.add(prioritised(id, prompt, tokens, priority));
        } else if draw(20) == 0 && !max_tokens.is_empty() {
            let gone = *max_tokens.keys().nth(draw(max_tokens.len())).unwrap();
            max_tokens.remove(&gone);
            assert!(scheduler.remove(RequestId(gone)).is_some());
        }
        let schedule = scheduler.schedule(if draw(5) == 0 { draw(20) } else { ALL });
        let decodes = schedule.batch.iter().take_while(|scheduled| scheduled.is_decode).count();
        assert!(schedule.batch[decodes..].iter().all(|scheduled| !scheduled.is_decode), "decodes come first");
        assert!(schedule.batch.iter().map(|scheduled| scheduled.num_tokens).sum::<usize>() <= 32);
        for scheduled in &schedule.batch {
            let sequence = &scheduler.running[&scheduled.place];
            let end = sequence.num_computed_tokens + scheduled.num_tokens;
            assert!(end <= sequence.block_table.block_ids().len() * 16, "a token without a slot");
        }
        writes_are_private(&scheduler, &schedule);
        advance(&mut scheduler, &schedule, draw(2) as u32);
        let mut holders: HashMap<u32, u32> = HashMap::new();
        for sequence in scheduler.running.values() {
            sequence.block_table.block_ids().iter().for_each(|&block| *holders.entry(block).or_default() += 1);
        }
        scheduler.blocks.pool().check(&holders);
        for scheduled in schedule.batch {
            let sequence = &scheduler.running[&scheduled.place];
            if sequence.num_generated() >= sequence.params.max_tokens {
                cached += sequence.num_cached_tokens.unwrap();
                finished += 1;
                max_tokens.remove(&scheduled.id.0);
                scheduler.remove(scheduled.id).unwrap();
            }
        }
    }
    let preemptions = scheduler.counters().num_preemptions;
    assert!(finished > 1000 && cached > 1000 && preemptions > 100, "{finished} {cached} {preemptions}");
    while !scheduler.is_idle() {
        let schedule = scheduler.schedule(ALL);
        assert!(!schedule.batch.is_empty() || !schedule.preempted.is_empty(), "a step that does nothing: a deadlock");
        advance(&mut scheduler, &schedule, 0);
        for scheduled in schedule.batch {
            let sequence = &scheduler.running[&scheduled.place];
            if sequence.num_generated() >= sequence.params.max_tokens {
                scheduler.remove(scheduled.id).unwrap();
            }
        }
    }
    assert_eq!(scheduler.blocks().num_free_blocks(), 12);
}

/// No slot that this step writes is in a block that another running sequence holds or that has a name.
fn writes_are_private(scheduler: &Scheduler, schedule: &Schedule) {
    let mut holders: HashMap<u32, usize> = HashMap::new();
    for sequence in scheduler.running.values() {
        sequence.block_table.block_ids().iter().for_each(|&block| *holders.entry(block).or_default() += 1);
    }
    for scheduled in &schedule.batch {
        let sequence = &scheduler.running[&scheduled.place];
        let (start, end) = (sequence.num_computed_tokens, sequence.num_computed_tokens + scheduled.num_tokens);
        for position in start..end {
            let block = sequence.block_table.block_ids()[position / 16];
            assert_eq!(holders[&block], 1, "block {block} is written and shared");
            assert_eq!(scheduler.blocks.pool().hash(block), None, "block {block} is written and has a name");
        }
    }
}
