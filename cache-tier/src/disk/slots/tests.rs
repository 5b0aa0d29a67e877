//! The index: claims, pins, leases, classes, and its memory.

use super::*;

const SHAPE: SlotShape = SlotShape { front_bytes: 256, slot_bytes: 4096 };

fn key(number: u8) -> ShortKey {
    ShortKey([number; 16])
}

fn store(slots: &mut Slots<u8>, number: u8) -> Claim {
    let class = slots.class(SHAPE);
    let claim = slots.claim(class, key(number), ADMITTED, false, 0);
    if let Claim::Slot { slot, .. } = claim {
        slots.publish(slot);
    }
    claim
}

fn with_slots(num_slots: usize) -> Slots<u8> {
    let mut slots = Slots::new(100);
    let class = slots.class(SHAPE);
    assert_eq!(slots.claim(class, key(0), ADMITTED, true, 0), Claim::NeedsSegment);
    slots.add_segment(class, 7, num_slots).unwrap();
    slots
}

#[test]
fn a_claimed_slot_is_found_once_it_is_published() {
    let mut slots = with_slots(2);
    let Claim::Slot { slot, evicted: false } = slots.claim(0, key(1), ADMITTED, false, 0) else { panic!() };
    assert!(!slots.contains(key(1)));
    slots.publish(slot);
    let (pin, handle) = slots.pin(key(1), 9).unwrap();
    assert_eq!((pin.slot, handle, slots.claim(0, key(1), 1, false, 0)), (slot, 7, Claim::Present));
    slots.release(slot);
    assert!(slots.contains(key(1)), "a live slot is nobody's to release");
    assert!(slots.condemn(pin) && !slots.condemn(pin) && !slots.contains(key(1)));
    slots.release(slot);
    assert!(slots.is_empty() && slots.classes[0].free.len() == 2);
}

#[test]
fn what_is_seen_once_is_remembered_and_admitted_the_second_time() {
    let mut slots = with_slots(1);
    assert_eq!(slots.claim(0, key(1), 1, false, 0), Claim::NotAdmitted);
    assert!(matches!(slots.claim(0, key(1), 1, false, 0), Claim::Slot { .. }));
}

#[test]
fn pinned_and_leased_slots_stay_until_their_deadline() {
    let mut slots = with_slots(2);
    store(&mut slots, 1);
    store(&mut slots, 2);
    let (pinned, _) = slots.pin(key(1), 30).unwrap();
    assert!(slots.lease(key(2), 10) && !slots.lease(key(9), 10));
    assert_eq!(slots.claim(0, key(3), ADMITTED, false, 9), Claim::Busy);
    let Claim::Slot { slot, evicted: true } = slots.claim(0, key(3), ADMITTED, false, 10) else { panic!() };
    assert!(slot != pinned.slot && !slots.contains(key(2)) && slots.contains(key(1)));
    slots.publish(slot);
    slots.lease(key(3), 100);
    // The reader never came back: its slot is used again, and its late end does not touch the new block's pins.
    assert_eq!(slots.claim(0, key(4), ADMITTED, false, 30), Claim::Slot { slot: pinned.slot, evicted: true });
    slots.publish(pinned.slot);
    let (late, _) = slots.pin(key(4), 60).unwrap();
    slots.unpin(pinned);
    assert!(!slots.condemn(pinned), "what it found damaged is long gone");
    assert_eq!(slots.claim(0, key(5), ADMITTED, false, 40), Claim::Busy);
    slots.unpin(late);
    assert!(matches!(slots.claim(0, key(5), ADMITTED, false, 40), Claim::Slot { .. }));
}

#[test]
fn a_class_without_room_takes_a_segment_from_another() {
    let mut slots = with_slots(4);
    for number in 1..5 {
        store(&mut slots, number);
    }
    let other = slots.class(SlotShape { front_bytes: 256, slot_bytes: 8192 });
    assert_eq!(slots.claim(other, key(50), ADMITTED, false, 0), Claim::Busy);
    slots.pin(key(1), 5).unwrap();
    assert_eq!(slots.segment_to_take(other, 0), None, "one of its blocks is being read");
    let taken = slots.segment_to_take(other, 5).unwrap();
    assert_eq!(slots.remove_segment(taken, |&handle| handle == 8), None, "another has its number");
    assert_eq!((slots.remove_segment(taken, |_| true), slots.len()), (Some((7, 4)), 0));
    slots.add_segment(other, 8, 2).unwrap();
    assert!(matches!(slots.claim(other, key(50), ADMITTED, false, 0), Claim::Slot { .. }));
    assert_eq!(slots.segment_to_take(0, 5), None, "what is claimed stays");
}

#[test]
fn the_index_takes_less_than_a_hundred_bytes_a_block() {
    let mut slots = Slots::new(1 << 20);
    let class = slots.class(SHAPE);
    slots.add_segment(class, 0, MAX_SLOTS).unwrap();
    for number in 0..MAX_SLOTS as u64 {
        let mut key = [0; 16];
        key[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        slots.ghost.note(number);
        slots.restore(0, number as usize, ShortKey(key));
    }
    slots.settle();
    let bytes = slots.memory_bytes() as f64 / MAX_SLOTS as f64;
    assert!(slots.len() == MAX_SLOTS && bytes < 100.0, "{bytes} bytes");
}
