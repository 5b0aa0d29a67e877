//! Sets of workers, each kept once: most chunks are held by the same few.
//!
//! Owned by the index. A chunk names its set by number; adding or taking a worker leads from one number to another.
//! Invariant: equal sets have equal numbers, and a set that no chunk names is forgotten.

use std::collections::HashMap;
use std::sync::Arc;

/// Number of a worker in the index.
pub type Slot = u16;
/// Number of a set. 0 is the empty one.
pub type SetId = u32;

#[derive(Debug)]
struct Set {
    members: Arc<[Slot]>,
    num_chunks: u32,
}

/// All sets in use.
#[derive(Debug)]
pub struct Sets {
    sets: Vec<Set>,
    by_members: HashMap<Arc<[Slot]>, SetId>,
    /// Numbers to be given out again.
    free: Vec<SetId>,
    /// Numbers that no chunk names; steps may still lead to them.
    dead: Vec<SetId>,
    /// Where adding or taking a worker led to last: it is asked again and again.
    steps: HashMap<(SetId, Slot, bool), SetId>,
    /// The last such step: a worker tells of many chunks at a time.
    last: Option<((SetId, Slot, bool), SetId)>,
}

/// Steps that are remembered.
const MAX_STEPS: usize = 4096;

impl Default for Sets {
    fn default() -> Self {
        let empty: Arc<[Slot]> = [].into();
        let sets = vec![Set { members: Arc::clone(&empty), num_chunks: 1 }];
        Self {
            sets,
            by_members: HashMap::from([(empty, 0)]),
            free: Vec::new(),
            dead: Vec::new(),
            steps: HashMap::new(),
            last: None,
        }
    }
}

impl Sets {
    /// The workers of a set, in order.
    pub fn members(&self, id: SetId) -> &[Slot] {
        &self.sets[id as usize].members
    }

    /// The set with a worker more, or less; a chunk that named the one names the other from now on.
    pub fn step(&mut self, from: SetId, slot: Slot, adds: bool) -> SetId {
        if let Some((step, to)) = self.last
            && step == (from, slot, adds)
            && self.sets[to as usize].num_chunks > 0
        {
            self.enter(to);
            self.leave(from);
            return to;
        }
        let is_member = self.members(from).binary_search(&slot).is_ok();
        if is_member == adds {
            return from;
        }
        let to = match self.steps.get(&(from, slot, adds)) {
            Some(&to) if self.sets[to as usize].num_chunks > 0 => to,
            _ => self.find(from, slot, adds),
        };
        self.enter(to);
        self.last = Some(((from, slot, adds), to));
        self.leave(from);
        to
    }

    /// A chunk names the set. The empty one is there whether any does or not.
    fn enter(&mut self, id: SetId) {
        if id != 0 {
            self.sets[id as usize].num_chunks += 1;
        }
    }

    fn find(&mut self, from: SetId, slot: Slot, adds: bool) -> SetId {
        let mut members = self.members(from).to_vec();
        match members.binary_search(&slot) {
            Ok(at) => drop(members.remove(at)),
            Err(at) => members.insert(at, slot),
        }
        let members: Arc<[Slot]> = members.into();
        let to = match self.by_members.get(&members) {
            Some(&to) => to,
            None => self.insert(members),
        };
        if self.steps.len() >= MAX_STEPS {
            self.steps.clear();
            self.last = None;
            self.free.append(&mut self.dead);
        }
        self.steps.insert((from, slot, adds), to);
        to
    }

    fn insert(&mut self, members: Arc<[Slot]>) -> SetId {
        let set = Set { members: Arc::clone(&members), num_chunks: 0 };
        let id = match self.free.pop() {
            Some(id) => {
                self.sets[id as usize] = set;
                id
            }
            None => {
                self.sets.push(set);
                (self.sets.len() - 1) as SetId
            }
        };
        self.by_members.insert(members, id);
        id
    }

    /// A chunk names the set no longer.
    pub fn leave(&mut self, id: SetId) {
        let set = &mut self.sets[id as usize];
        if id != 0 {
            set.num_chunks -= 1;
            if set.num_chunks == 0 {
                self.by_members.remove(&set.members);
                self.dead.push(id);
            }
        }
    }

    /// Whether no chunk names any.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.by_members.len() == 1
    }

    /// Bytes in memory, about.
    pub fn num_bytes(&self) -> usize {
        let members: usize = self.sets.iter().map(|set| set.members.len() * 2 + 16).sum();
        members + self.sets.capacity() * size_of::<Set>() + self.by_members.capacity() * 33 + self.steps.capacity() * 17
    }
}
