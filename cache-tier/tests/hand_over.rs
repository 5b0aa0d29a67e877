//! The hand-over of a slot between readers and the writer, in every interleaving that loom finds: nobody reads a slot that is
//! being written, and what a reader finds under a key is what was written under it.

use cache_tier::disk::slots::{Claim, ShortKey, SlotShape, Slots};
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};
use loom::thread;
use protocol::{BlockHash, BlockKey, ModelFingerprint};

const SHAPE: SlotShape = SlotShape { front_bytes: 256, slot_bytes: 4096 };

fn key(number: u8) -> ShortKey {
    let block = BlockHash::from_bytes([number; 32]);
    ShortKey::of(&BlockKey { model: ModelFingerprint::from_bytes([0; 32]), block })
}

struct Disk {
    slots: Mutex<Slots<()>>,
    /// What lies in each slot: the number of its block. Loom fails where a write meets any other access.
    memory: Vec<UnsafeCell<u8>>,
}

impl Disk {
    fn new(num_slots: usize) -> Arc<Self> {
        let mut slots = Slots::new(8);
        let class = slots.class(SHAPE);
        slots.add_segment(class, (), num_slots).unwrap();
        let memory = (0..num_slots).map(|_| UnsafeCell::new(0)).collect();
        Arc::new(Self { slots: Mutex::new(slots), memory })
    }

    fn write(&self, number: u8) {
        let claim = self.slots.lock().unwrap().claim(0, key(number), 2, false, 1);
        if let Claim::Slot { slot, .. } = claim {
            // SAFETY: a claimed slot is the writer's alone; that is what loom checks here.
            self.memory[slot.index()].with_mut(|byte| unsafe { *byte = number });
            self.slots.lock().unwrap().publish(slot);
        }
    }

    fn read(&self, number: u8) {
        let pinned = self.slots.lock().unwrap().pin(key(number), 100);
        if let Some((pin, ())) = pinned {
            // SAFETY: a pinned slot is not written; that is what loom checks here.
            let found = self.memory[pin.slot.index()].with(|byte| unsafe { *byte });
            assert_eq!(found, number, "another block's bytes");
            self.slots.lock().unwrap().unpin(pin);
        }
    }
}

#[test]
fn a_reader_and_the_writer_never_meet_in_a_slot() {
    loom::model(|| {
        let disk = Disk::new(1);
        disk.write(1);
        let reader = {
            let disk = Arc::clone(&disk);
            thread::spawn(move || {
                disk.read(1);
                disk.read(2);
            })
        };
        disk.write(2);
        reader.join().unwrap();
        disk.read(1);
        disk.read(2);
    });
}

#[test]
fn two_readers_of_one_slot_hold_the_writer_off() {
    loom::model(|| {
        let disk = Disk::new(1);
        disk.write(1);
        let readers = [1, 2].map(|_| {
            let disk = Arc::clone(&disk);
            thread::spawn(move || disk.read(1))
        });
        disk.write(2);
        for reader in readers {
            reader.join().unwrap();
        }
        assert_eq!(disk.slots.lock().unwrap().len(), 1);
    });
}
