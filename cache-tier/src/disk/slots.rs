//! The index: which block lies in which slot, and what each slot may be used for now.
//!
//! Behind one lock in the store; pure, and generic over what a segment is, so that the hand-over between readers and the
//! writer is checked with loom (`tests/hand_over.rs`). A slot is free → claimed (the writer fills it, nobody finds it) →
//! live (found, pinned by readers) → free. Invariants: a key leads to at most one live slot; a claimed slot has no pins; a
//! pinned or leased slot is not claimed before its pin's or lease's deadline.
//!
//! Keys are kept as 16 of their bytes, beside the slots, and the table holds slot numbers: about 60 bytes a block in all.

use hashbrown::HashTable;
use protocol::BlockKey;

use crate::eviction::{Eviction, MAX_USES, Queue, Residency, Residents};
use crate::ghost::Ghost;
use crate::policy::ADMITTED;

/// Bits of a slot's number that tell it within its segment.
const SLOT_BITS: u32 = 20;
/// Most slots a segment.
pub const MAX_SLOTS: usize = 1 << SLOT_BITS;
/// Most segments.
pub const MAX_SEGMENTS: usize = 1 << (32 - SLOT_BITS);

/// A slot of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(u32);

impl SlotId {
    fn new(segment: usize, index: usize) -> Self {
        Self((segment as u32) << SLOT_BITS | index as u32)
    }

    /// Its segment.
    pub fn segment(self) -> usize {
        (self.0 >> SLOT_BITS) as usize
    }

    /// Its place there.
    pub fn index(self) -> usize {
        self.0 as usize % MAX_SLOTS
    }
}

/// 16 bytes of a key: block and model mixed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShortKey([u8; 16]);

impl ShortKey {
    /// Of a whole key.
    pub fn of(key: &BlockKey) -> Self {
        let mut short = [0; 16];
        for (out, (a, b)) in short.iter_mut().zip(key.block.as_bytes().iter().zip(key.model.as_bytes())) {
            *out = a ^ b;
        }
        Self(short)
    }

    /// Names are hashes already.
    pub(super) fn hash(self) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(bytes)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Claimed,
    Live,
}

#[derive(Clone, Debug)]
struct Slot {
    key: ShortKey,
    state: State,
    /// Whether it was handed out unchecked, so that who received it may know that it is damaged.
    is_doubtful: bool,
    uses: u8,
    pins: u16,
    /// Another for every block that was ever in a slot.
    generation: u32,
    /// Seconds of the store's clock until which a pin, or a lease, keeps it.
    pinned_until: u32,
    leased_until: u32,
}

const FREE: Slot = Slot {
    key: ShortKey([0; 16]),
    state: State::Free,
    is_doubtful: false,
    uses: 0,
    pins: 0,
    generation: 0,
    pinned_until: 0,
    leased_until: 0,
};

/// A block in a slot that somebody reads: what is done to the slot later is done only while it is still that block's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Where it is.
    pub slot: SlotId,
    generation: u32,
}

#[derive(Debug)]
struct Segment<S> {
    handle: S,
    class: usize,
    slots: Vec<Slot>,
}

/// Sizes of slots that share segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotShape {
    /// Bytes of a slot's header at the front of its segment.
    pub front_bytes: usize,
    /// Bytes of a slot.
    pub slot_bytes: usize,
}

#[derive(Debug)]
struct Class {
    shape: SlotShape,
    free: Vec<SlotId>,
    eviction: Eviction,
    /// Claims since segments were last moved between classes.
    claims: u64,
}

/// What becomes of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The block is there.
    Present,
    /// It was seen for the first time.
    NotAdmitted,
    /// It goes here. Where `evicted`, another block was here.
    Slot {
        /// Where.
        slot: SlotId,
        /// Whether a block made room.
        evicted: bool,
    },
    /// It needs a segment of this class first.
    NeedsSegment,
    /// All slots are being read, leased or written.
    Busy,
}

/// The index of one store.
#[derive(Debug)]
pub struct Slots<S> {
    table: HashTable<u32>,
    segments: Vec<Option<Segment<S>>>,
    classes: Vec<Class>,
    ghost: Ghost,
    num_live: usize,
    generation: u32,
}

/// The slots of all segments as eviction sees them, at a time.
struct At<'a, S>(&'a mut [Option<Segment<S>>], u32);

impl<S> Residents for At<'_, S> {
    fn residency(&self, id: u32) -> Residency {
        match slot_of(self.0, SlotId(id)) {
            Some(slot) if slot.state != State::Live => Residency::Gone,
            Some(slot) if slot.is_held(self.1) => Residency::Held,
            Some(slot) => Residency::Uses(slot.uses),
            None => Residency::Gone,
        }
    }

    fn set_uses(&mut self, id: u32, uses: u8) {
        if let Some(slot) = slot_of_mut(self.0, SlotId(id)) {
            slot.uses = uses;
        }
    }
}

impl Slot {
    fn is_held(&self, now: u32) -> bool {
        (self.pins > 0 && now < self.pinned_until) || now < self.leased_until
    }
}

fn slot_of<S>(segments: &[Option<Segment<S>>], id: SlotId) -> Option<&Slot> {
    segments.get(id.segment())?.as_ref()?.slots.get(id.index())
}

fn slot_of_mut<S>(segments: &mut [Option<Segment<S>>], id: SlotId) -> Option<&mut Slot> {
    segments.get_mut(id.segment())?.as_mut()?.slots.get_mut(id.index())
}

impl<S: Clone> Slots<S> {
    /// An empty index whose ghost list remembers so many keys.
    pub fn new(num_remembered: usize) -> Self {
        let (table, segments, classes) = (HashTable::new(), Vec::new(), Vec::new());
        Self { table, segments, classes, ghost: Ghost::new(num_remembered), num_live: 0, generation: 0 }
    }

    /// Blocks held.
    pub fn len(&self) -> usize {
        self.num_live
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.num_live == 0
    }

    /// Bytes of memory that the index takes.
    pub fn memory_bytes(&self) -> usize {
        let slots: usize = self.segments.iter().flatten().map(|segment| segment.slots.len() * size_of::<Slot>()).sum();
        let queues: usize =
            self.classes.iter().map(|class| class.eviction.memory_bytes() + class.free.capacity() * 4).sum();
        slots + queues + self.table.capacity() * 8 / 7 * 5 + self.ghost.memory_bytes()
    }

    fn find(&self, key: ShortKey) -> Option<SlotId> {
        let same = |&id: &u32| slot_of(&self.segments, SlotId(id)).is_some_and(|slot| slot.key == key);
        self.table.find(key.hash(), same).map(|&id| SlotId(id))
    }

    /// Whether a block is held.
    pub fn contains(&self, key: ShortKey) -> bool {
        self.find(key).is_some()
    }

    /// Finds a block and keeps its slot from being claimed until it is unpinned, or until the deadline.
    pub fn pin(&mut self, key: ShortKey, until: u32) -> Option<(Pin, S)> {
        let id = self.find(key)?;
        let segment = self.segments.get_mut(id.segment())?.as_mut()?;
        let slot = segment.slots.get_mut(id.index())?;
        slot.uses = (slot.uses + 1).min(MAX_USES);
        slot.pins = slot.pins.saturating_add(1);
        slot.pinned_until = slot.pinned_until.max(until);
        Some((Pin { slot: id, generation: slot.generation }, segment.handle.clone()))
    }

    /// Notes that a pinned block goes out unchecked.
    pub fn doubt(&mut self, pin: Pin) {
        if let Some(slot) = slot_of_mut(&mut self.segments, pin.slot).filter(|slot| slot.generation == pin.generation) {
            slot.is_doubtful = true;
        }
    }

    /// Whether a held block was handed out unchecked since this was last asked; `None` where it is not held.
    pub fn take_doubt(&mut self, key: ShortKey) -> Option<bool> {
        let id = self.find(key)?;
        Some(std::mem::take(&mut slot_of_mut(&mut self.segments, id)?.is_doubtful))
    }

    /// Ends a pin. One that outlived its deadline, and whose slot was claimed since, ends nothing.
    pub fn unpin(&mut self, pin: Pin) {
        if let Some(slot) = slot_of_mut(&mut self.segments, pin.slot).filter(|slot| slot.generation == pin.generation) {
            slot.pins = slot.pins.saturating_sub(1);
        }
    }

    /// Claims the slot of a pinned block that turned out to be damaged, so that whoever pinned it may clear and release it.
    /// False where it is another block's by now, or somebody else found out before.
    pub fn condemn(&mut self, pin: Pin) -> bool {
        let slot = slot_of(&self.segments, pin.slot);
        if slot.is_none_or(|slot| slot.state != State::Live || slot.generation != pin.generation) {
            return false;
        }
        self.unlink(pin.slot);
        for class in &mut self.classes {
            class.eviction.retain(|queued| queued != pin.slot.0);
        }
        if let Some(slot) = slot_of_mut(&mut self.segments, pin.slot) {
            slot.state = State::Claimed;
        }
        true
    }

    /// Keeps a block until a time; false where it is not held.
    pub fn lease(&mut self, key: ShortKey, until: u32) -> bool {
        let Some(id) = self.find(key) else { return false };
        let Some(slot) = slot_of_mut(&mut self.segments, id) else { return false };
        slot.leased_until = slot.leased_until.max(until);
        true
    }

    /// The class of slots of this shape.
    pub fn class(&mut self, shape: SlotShape) -> usize {
        if let Some(class) = self.classes.iter().position(|class| class.shape == shape) {
            return class;
        }
        self.classes.push(Class { shape, free: Vec::new(), eviction: Eviction::default(), claims: 0 });
        self.classes.len() - 1
    }

    /// Takes a slot for a block that was touched so often; `can_grow` tells whether another segment may be made.
    pub fn claim(&mut self, class: usize, key: ShortKey, touches: u32, can_grow: bool, now: u32) -> Claim {
        if let Some(id) = self.find(key) {
            if let Some(slot) = slot_of_mut(&mut self.segments, id) {
                slot.uses = (slot.uses + 1).min(MAX_USES);
            }
            return Claim::Present;
        }
        let was_remembered = self.ghost.take(key.hash());
        if touches + u32::from(was_remembered) < ADMITTED {
            self.ghost.note(key.hash());
            return Claim::NotAdmitted;
        }
        self.classes[class].claims += 1;
        let claim = self.place(class, can_grow, now);
        match claim {
            Claim::Slot { slot: id, .. } => {
                self.generation = self.generation.wrapping_add(1);
                let generation = self.generation;
                if let Some(slot) = slot_of_mut(&mut self.segments, id) {
                    *slot = Slot { key, state: State::Claimed, uses: u8::from(was_remembered), generation, ..FREE };
                }
            }
            // It will be tried again.
            _ if was_remembered => self.ghost.note(key.hash()),
            _ => {}
        }
        claim
    }

    fn place(&mut self, class: usize, can_grow: bool, now: u32) -> Claim {
        if let Some(slot) = self.classes[class].free.pop() {
            return Claim::Slot { slot, evicted: false };
        }
        if can_grow {
            return Claim::NeedsSegment;
        }
        let victim = self.classes[class].eviction.victim(&mut At(&mut self.segments, now));
        let Some((id, queue)) = victim else { return Claim::Busy };
        let slot = SlotId(id);
        if let Some(key) = self.unlink(slot)
            && queue == Queue::Small
        {
            self.ghost.note(key.hash());
        }
        Claim::Slot { slot, evicted: true }
    }

    /// Takes a live slot out of the table.
    fn unlink(&mut self, id: SlotId) -> Option<ShortKey> {
        let slot = slot_of_mut(&mut self.segments, id).filter(|slot| slot.state == State::Live)?;
        let key = slot.key;
        *slot = FREE;
        if let Ok(entry) = self.table.find_entry(key.hash(), |&found| found == id.0) {
            entry.remove();
        }
        self.num_live -= 1;
        Some(key)
    }

    /// The writer has filled a claimed slot: it can be found. False where its segment was lost meanwhile.
    pub fn publish(&mut self, id: SlotId) -> bool {
        let Some(segment) = self.segments.get_mut(id.segment()).and_then(Option::as_mut) else { return false };
        let class = segment.class;
        let claimed = segment.slots.get_mut(id.index()).filter(|slot| slot.state == State::Claimed);
        let Some(slot) = claimed else { return false };
        slot.state = State::Live;
        let (key, was_remembered) = (slot.key, slot.uses > 0);
        self.link(key, id);
        self.classes[class].eviction.insert(id.0, was_remembered);
        true
    }

    fn link(&mut self, key: ShortKey, id: SlotId) {
        let segments = &self.segments;
        let hash = |&id: &u32| slot_of(segments, SlotId(id)).map_or(0, |slot| slot.key.hash());
        self.table.insert_unique(key.hash(), id.0, hash);
        self.num_live += 1;
    }

    /// A claimed slot was not filled, or is cleared: it is free.
    pub fn release(&mut self, id: SlotId) {
        let Some(segment) = self.segments.get_mut(id.segment()).and_then(Option::as_mut) else { return };
        let claimed = segment.slots.get_mut(id.index()).filter(|slot| slot.state == State::Claimed);
        if let Some(slot) = claimed {
            *slot = FREE;
            self.classes[segment.class].free.push(id);
        }
    }

    /// Adds a segment of free slots; `None` where there are too many.
    pub fn add_segment(&mut self, class: usize, handle: S, num_slots: usize) -> Option<usize> {
        let number = self.segments.iter().position(Option::is_none).unwrap_or(self.segments.len());
        if number >= MAX_SEGMENTS || num_slots > MAX_SLOTS {
            return None;
        }
        let segment = Segment { handle, class, slots: vec![FREE; num_slots] };
        self.table.reserve(num_slots, |&id| slot_of(&self.segments, SlotId(id)).map_or(0, |slot| slot.key.hash()));
        match self.segments.get_mut(number) {
            Some(place) => *place = Some(segment),
            None => self.segments.push(Some(segment)),
        }
        // Popped from the end: the first slot first.
        self.classes[class].free.extend((0..num_slots).rev().map(|index| SlotId::new(number, index)));
        Some(number)
    }

    /// Enters a block that was found in a slot of a segment at start; false where its key is there already.
    pub fn restore(&mut self, segment: usize, index: usize, key: ShortKey) -> bool {
        let id = SlotId::new(segment, index);
        if self.find(key).is_some() {
            return false;
        }
        let Some(slot) = slot_of_mut(&mut self.segments, id) else { return false };
        self.generation = self.generation.wrapping_add(1);
        *slot = Slot { key, state: State::Live, generation: self.generation, ..FREE };
        self.link(key, id);
        let class = self.segments[segment].as_ref().map_or(0, |segment| segment.class);
        self.classes[class].eviction.insert(id.0, false);
        true
    }

    /// After the last `restore`: slots that hold a block are not free.
    pub fn settle(&mut self) {
        for class in &mut self.classes {
            class.free.retain(|&id| slot_of(&self.segments, id).is_some_and(|slot| slot.state == State::Free));
        }
    }

    /// Takes a segment out with all that it holds, if it is the one that is meant; it and how many blocks it held.
    pub fn remove_segment(&mut self, number: usize, is_meant: impl Fn(&S) -> bool) -> Option<(S, usize)> {
        let segment = self.segments.get_mut(number)?.take_if(|segment| is_meant(&segment.handle))?;
        self.table.retain(|&mut id| SlotId(id).segment() != number);
        let num_live = segment.slots.iter().filter(|slot| slot.state == State::Live).count();
        self.num_live -= num_live;
        let class = &mut self.classes[segment.class];
        class.free.retain(|id| id.segment() != number);
        class.eviction.retain(|id| SlotId(id).segment() != number);
        Some((segment.handle, num_live))
    }

    /// Whether any slot of a segment is being read, leased or written.
    pub fn is_held(&self, number: usize, now: u32) -> bool {
        let segment = self.segments.get(number).and_then(Option::as_ref);
        segment.is_some_and(|s| s.slots.iter().any(|slot| slot.state == State::Claimed || slot.is_held(now)))
    }

    /// The segment that a class without room, or with far more puts for each of its segments, takes over from another:
    /// the one with the fewest blocks, none of which is held. `None` where the present division does.
    pub fn segment_to_take(&mut self, class: usize, now: u32) -> Option<usize> {
        let count = |of: usize| self.segments.iter().flatten().filter(|segment| segment.class == of).count();
        let own = count(class);
        let rate = |of: usize, segments: usize| self.classes[of].claims as f64 / segments.max(1) as f64;
        let donors = (0..self.classes.len()).filter(|&of| of != class && count(of) > 0);
        let donor = donors.min_by(|&a, &b| rate(a, count(a)).total_cmp(&rate(b, count(b))))?;
        let is_due =
            own == 0 || (self.classes[class].claims > 256 && rate(class, own) > 2.0 * rate(donor, count(donor)));
        if !is_due {
            return None;
        }
        self.classes.iter_mut().for_each(|class| class.claims = 0);
        let is_free = |slot: &Slot| slot.state != State::Claimed && !slot.is_held(now);
        let numbered =
            self.segments.iter().enumerate().filter_map(|(number, segment)| Some((number, segment.as_ref()?)));
        let takeable = numbered.filter(|(_, segment)| segment.class == donor && segment.slots.iter().all(is_free));
        let live = |segment: &Segment<S>| segment.slots.iter().filter(|slot| slot.state == State::Live).count();
        takeable.min_by_key(|(_, segment)| live(segment)).map(|(number, _)| number)
    }

    /// The segment of a slot.
    pub fn handle(&self, id: SlotId) -> Option<S> {
        Some(self.segments.get(id.segment())?.as_ref()?.handle.clone())
    }

    /// Every segment, with how many blocks it holds and how many it could.
    pub fn segments(&self) -> impl Iterator<Item = (usize, &S, usize, usize)> {
        let live = |segment: &Segment<S>| segment.slots.iter().filter(|slot| slot.state == State::Live).count();
        let numbered = self.segments.iter().enumerate();
        numbered.filter_map(move |(number, segment)| {
            let segment = segment.as_ref()?;
            Some((number, &segment.handle, live(segment), segment.slots.len()))
        })
    }
}

#[cfg(test)]
mod tests;
