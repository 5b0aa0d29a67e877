//! The scheduler with tiers below it: what it asks for, holds back, loads and puts down; and a device of names under random
//! operations, on which no sequence ever reads a block that holds anything but its own tokens.

use std::collections::{BTreeMap, HashMap, HashSet};

use bytes::Bytes;
use protocol::{BlockHash, PutReason};

use super::*;
use crate::kv::StagedBlock;

fn tiered(num_blocks: usize, max_num_batched_tokens: usize) -> Scheduler {
    let limits = SchedulerLimits { has_tiers: true, ..scheduler(1, max_num_batched_tokens).limits };
    Scheduler::new(limits, BlockManager::new(num_blocks, 16))
}

fn staged(names: &[BlockHash]) -> Vec<StagedBlock> {
    let block = |name: &BlockHash| StagedBlock { payload: Bytes::copy_from_slice(name.as_bytes()), room: None };
    names.iter().map(block).collect()
}

fn hashes(wanted: &Wanted) -> Vec<BlockHash> {
    wanted.blocks.iter().map(|name| name.hash).collect()
}

#[test]
fn a_sequence_is_held_back_until_its_blocks_are_here_and_others_pass() {
    let mut scheduler = tiered(100, 64);
    scheduler.add(sequence(1, own(1, 70), 5));
    scheduler.add(sequence(2, own(2, 10), 5));
    // Asks for the same blocks as the first: it waits for what that one brings.
    scheduler.add(sequence(3, own(1, 70), 5));
    let first = step(&mut scheduler);
    assert_eq!(shares(&first), vec![(2, 10)], "a prompt without a full block has nothing to wait for");
    assert_eq!(first.wanted.iter().map(|wanted| (wanted.id.0, wanted.blocks.len())).collect::<Vec<_>>(), [(1, 4)]);
    let wanted = hashes(&first.wanted[0]);
    let second = step(&mut scheduler);
    assert!(second.wanted.is_empty() && shares(&second) == vec![(2, 1)], "asked once");
    scheduler.stage(RequestId(1), staged(&wanted[..2]), false);
    assert_eq!(shares(&step(&mut scheduler)), vec![(2, 1)], "more may come");
    scheduler.stage(RequestId(1), staged(&wanted[2..3]), true);
    let third = step(&mut scheduler);
    let loaded: Vec<&[u8]> = third.copies.loads.iter().map(|load| &load.payload[..]).collect();
    assert_eq!(loaded, wanted[..3].iter().map(|name| &name.as_bytes()[..]).collect::<Vec<_>>());
    // The second's token, what the first lacks, and the third, which finds three blocks and waits for the fourth.
    assert_eq!(shares(&third), vec![(2, 1), (1, 22)]);
    let fourth = step(&mut scheduler);
    assert!(fourth.copies.loads.is_empty() && shares(&fourth)[2] == (3, 6), "{fourth:?}");
    assert_eq!(scheduler.counters().num_loaded_tokens, 48);
    assert_eq!(scheduler.remove(RequestId(1)).unwrap().num_cached_tokens, Some(48));
}

#[test]
fn blocks_that_find_no_place_are_not_called_cached() {
    let mut scheduler = tiered(80, 256);
    for id in 1..=3 {
        scheduler.add(sequence(id, own(id as u32, 31), 40));
    }
    scheduler.add(sequence(4, own(4, 16 * 73), 5));
    let mut wanted = Vec::new();
    for _ in 0..2 {
        let schedule = step(&mut scheduler);
        for asked in &schedule.wanted {
            if asked.id.0 == 4 {
                wanted = hashes(asked);
            } else {
                scheduler.stage(asked.id, Vec::new(), true);
            }
        }
    }
    assert_eq!(wanted.len(), 72);
    scheduler.stage(RequestId(4), staged(&wanted), true);
    // It loads what one step may, while the others come to the end of their second blocks and take the last free ones.
    let loads = |schedule: Schedule| schedule.copies.loads.len();
    assert_eq!(loads(step(&mut scheduler)), MAX_LOADS);
    assert_eq!(loads(step(&mut scheduler)), 7);
    assert_eq!(scheduler.remove(RequestId(4)).unwrap().num_cached_tokens, Some(16 * 71));
}

#[test]
fn what_is_used_again_goes_down_and_what_is_evicted_is_told() {
    let mut scheduler = tiered(8, 256);
    let mut run = |id: u64, number: u32| {
        scheduler.add(sequence(id, own(number, 40), 1));
        let (mut stores, mut rounds) = (Vec::new(), 0);
        while !scheduler.is_idle() && rounds < 10 {
            let schedule = step(&mut scheduler);
            for wanted in &schedule.wanted {
                scheduler.stage(wanted.id, Vec::new(), true);
            }
            stores.extend(schedule.copies.stores.iter().map(|store| (store.name.token_ids[0], store.reason)));
            if !schedule.batch.is_empty() {
                scheduler.remove(RequestId(id));
            }
            rounds += 1;
        }
        stores
    };
    assert_eq!(run(1, 1), []);
    assert_eq!(run(2, 1), [(1, PutReason::WriteThrough), (1, PutReason::WriteThrough)]);
    assert_eq!(run(3, 2), []);
    assert_eq!(run(4, 3), [], "six blocks have names, and two had none");
    // What was written through is told again: where it is, it is not written twice.
    let evicted = run(5, 4);
    assert!(!evicted.is_empty() && evicted.iter().all(|(_, reason)| *reason == PutReason::Evict), "{evicted:?}");
}

/// A device whose blocks hold names, and tiers that hold some.
struct Device {
    scheduler: Scheduler,
    holds: Vec<Option<BlockHash>>,
    tiers: HashSet<BlockHash>,
    asked: Vec<Wanted>,
}

impl Device {
    /// A step: what leaves is what it says, what arrives and is computed is there, and all that is read is right.
    fn step(&mut self) -> Schedule {
        let mut schedule = self.scheduler.schedule(ALL);
        self.asked.append(&mut schedule.wanted);
        for store in &schedule.copies.stores {
            assert_eq!(self.holds[store.block_id as usize], Some(store.name.hash), "what left is another block");
            self.tiers.insert(store.name.hash);
        }
        let mut places = HashSet::new();
        for load in &schedule.copies.loads {
            assert!(places.insert(load.block_id), "two blocks are loaded into one place");
            let name = <[u8; 32]>::try_from(&load.payload[..]).unwrap();
            self.holds[load.block_id as usize] = Some(BlockHash::from_bytes(name));
        }
        for scheduled in &schedule.batch {
            let sequence = self.scheduler.running_mut(scheduled.place).unwrap();
            let table = sequence.block_table.block_ids();
            let before = sequence.num_computed_tokens / 16;
            for (index, (&block_id, name)) in table.iter().zip(sequence.block_hashes()).take(before).enumerate() {
                assert_eq!(self.holds[block_id as usize], Some(*name), "block {index} of {:?}", scheduled.id);
            }
            let after = (sequence.num_computed_tokens + scheduled.num_tokens) / 16;
            let end = (sequence.num_computed_tokens + scheduled.num_tokens).div_ceil(16);
            for (index, &block_id) in table.iter().enumerate().take(end).skip(before) {
                self.holds[block_id as usize] = sequence.block_hashes().get(index).copied().filter(|_| index < after);
            }
        }
        advance(&mut self.scheduler, &schedule, 1);
        schedule
    }

    /// The tiers' answer to the oldest question: all that they have, a part of it, or nothing.
    fn answer(&mut self, pick: u64) {
        let Some(wanted) = (!self.asked.is_empty()).then(|| self.asked.remove(0)) else { return };
        let found: Vec<BlockHash> = hashes(&wanted).into_iter().take_while(|name| self.tiers.contains(name)).collect();
        let few = found.len().min(pick as usize % 7);
        self.scheduler.stage(wanted.id, staged(&found[..few]), false);
        let rest = if pick.is_multiple_of(3) { &[][..] } else { &found[few..] };
        self.scheduler.stage(wanted.id, staged(rest), true);
    }
}

#[test]
fn random_operations_never_read_a_block_that_holds_anything_else() {
    let mut device =
        Device { scheduler: tiered(24, 48), holds: vec![None; 24], tiers: HashSet::new(), asked: Vec::new() };
    let (mut state, mut next_id, mut ages) = (5u64, 0u64, BTreeMap::new());
    let (mut num_loads, mut num_preempted) = (0, 0);
    for _ in 0..20_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (kind, pick) = ((state >> 33) % 8, state >> 40);
        match kind {
            0 if device.scheduler.num_waiting() < 6 => {
                let shared = (0..pick % 90).map(|i| (pick % 5 * 1000 + i) as u32);
                let prompt: Vec<u32> =
                    shared.chain((0..1 + pick % 40).map(|i| (100_000 + next_id + i) as u32)).collect();
                device.scheduler.add(prioritised(next_id, prompt, 60, (pick % 2) as i32));
                ages.insert(next_id, 0);
                next_id += 1;
            }
            1 => {
                // A client that goes away, wherever its request stands.
                let gone =
                    ages.keys().copied().min_by_key(|id| (id * 31 + pick) % 17).filter(|_| pick.is_multiple_of(4));
                if let Some(id) = gone {
                    device.scheduler.remove(RequestId(id));
                    ages.remove(&id);
                }
            }
            2 | 3 => device.answer(pick),
            _ => {
                let schedule = device.step();
                num_loads += schedule.copies.loads.len();
                num_preempted += schedule.preempted.len();
                for scheduled in &schedule.batch {
                    let age = ages.entry(scheduled.id.0).or_insert(0);
                    *age += 1;
                    if *age > 60 {
                        device.scheduler.remove(scheduled.id);
                        ages.remove(&scheduled.id.0);
                    }
                }
            }
        }
    }
    assert!(num_loads > 500 && num_preempted > 50 && next_id > 1000, "{num_loads} {num_preempted} {next_id}");
    for id in ages.into_keys() {
        device.scheduler.remove(RequestId(id));
    }
    assert_eq!(device.scheduler.blocks().num_free_blocks(), 24);
    device.scheduler.blocks().pool().check(&HashMap::new());
}
