//! The index against a map of sets, under random operations; its bound; what is left when workers go.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

fn chain(numbers: &[u64]) -> Vec<Chunk> {
    // Hashes as a hash function gives them: all bits matter.
    numbers.iter().map(|&n| Chunk { hash: hash(n), message: 0, end: 0 }).collect()
}

fn hash(number: u64) -> u64 {
    twox_hash::XxHash3_64::oneshot(&number.to_le_bytes())
}

fn chunk(number: u64) -> HeldChunk {
    HeldChunk { hash: hash(number), num_tokens: number as u32, tier: 0 }
}

#[test]
fn one_walk_answers_for_all_workers() {
    let index = Index::new(100);
    index.store(1, &[chunk(10), chunk(20), chunk(30)]);
    index.store(2, &[chunk(10)]);
    // Without the first, the second says nothing.
    index.store(3, &[chunk(20)]);
    let mut held = index.held(&chain(&[10, 20, 30, 40]));
    held.sort_by_key(|held| held.slot);
    let of = |slot, num_chunks, num_tokens| Held { slot, num_chunks, num_tokens };
    assert_eq!(held, [of(1, 3, 30), of(2, 1, 10)]);
    assert_eq!(index.held(&chain(&[40])), []);
    assert_eq!(index.held(&[]), []);
}

#[test]
fn it_is_what_a_map_of_sets_is_under_random_operations() {
    let index = Index::new(usize::MAX);
    let mut model: BTreeMap<u64, BTreeSet<Slot>> = BTreeMap::new();
    let mut state = 3u64;
    for _ in 0..30_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (number, slot) = ((state >> 33) % 60, (state >> 45) as Slot % 6);
        match (state >> 56) % 64 {
            0 => {
                index.remove_worker(slot);
                for slots in model.values_mut() {
                    slots.remove(&slot);
                }
            }
            1..24 => {
                index.remove(slot, &[hash(number)]);
                model.entry(number).or_default().remove(&slot);
            }
            _ => {
                index.store(slot, &[chunk(number)]);
                model.entry(number).or_default().insert(slot);
            }
        }
        let numbers: Vec<u64> = (number..number + 4).collect();
        let mut held = index.held(&chain(&numbers));
        held.sort_by_key(|held| held.slot);
        let has = |slot: Slot, number: &u64| model.get(number).is_some_and(|slots| slots.contains(&slot));
        let expected = (0..6).filter_map(|slot| {
            let num_chunks = numbers.iter().take_while(|number| has(slot, number)).count();
            let num_tokens = numbers[num_chunks.checked_sub(1)?] as u32;
            Some(Held { slot, num_chunks, num_tokens })
        });
        assert_eq!(held, expected.collect::<Vec<_>>());
    }
    assert_eq!(index.len(), model.values().filter(|slots| !slots.is_empty()).count());
    (0..6).for_each(|slot| index.remove_worker(slot));
    assert!(index.is_empty() && read(&index.sets).is_empty(), "{index:?}");
}

#[test]
fn what_finds_no_room_is_counted_and_room_that_is_given_back_is_used() {
    let index = Index::new(2);
    index.store(0, &[chunk(1), chunk(2), chunk(3)]);
    assert_eq!((index.len(), index.num_refused()), (2, 1));
    // One more worker of a chunk that is there takes no room.
    index.store(1, &[chunk(2)]);
    index.remove(0, &[hash(1)]);
    index.store(0, &[chunk(3)]);
    assert_eq!((index.len(), index.num_refused()), (2, 1));
    assert!(index.num_bytes() > 0);
}
