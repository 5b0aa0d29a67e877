//! Where a prompt goes that no worker holds: a consistent-hash ring with virtual nodes, weights and bounded load.
//!
//! Built by the fleet when workers come and go, walked by the picker. Invariants: the walk is a pure function of the workers'
//! names, their weights and the key, so that routers that share no state agree; on join or leave only the keys move that
//! the worker in question gets or had.
//! Bounded load: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016).

use std::hash::{Hash, Hasher};

use consistent_hash::{Node, RingHash, StaticHashRing};
use twox_hash::XxHash3_64;

/// Virtual nodes of a worker of weight 1.
const VIRTUAL_NODES: usize = 96;
/// A worker may have so many times the mean load before the walk passes it by.
pub const LOAD_BOUND: f64 = 1.25;
/// Largest weight.
const MAX_WEIGHT: usize = 64;

/// XXH3, with integers as little-endian bytes: the same on every machine and in every release.
#[derive(Clone, Copy, Debug)]
struct StableHash;

struct StableHasher(XxHash3_64);

impl Hasher for StableHasher {
    fn finish(&self) -> u64 {
        self.0.finish()
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    fn write_u64(&mut self, value: u64) {
        self.0.write(&value.to_le_bytes());
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }
}

impl RingHash for StableHash {
    fn hash_item<T: Hash>(&self, item: &T) -> u64 {
        let mut hasher = StableHasher(XxHash3_64::new());
        item.hash(&mut hasher);
        hasher.finish()
    }
}

/// A worker on the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingWorker {
    /// Its name: where it stands on the ring follows from it.
    pub name: String,
    /// Its place in the fleet.
    pub place: usize,
    /// A power of two.
    pub weight: usize,
}

/// The ring of one set of workers.
#[derive(Debug)]
pub struct Ring {
    ring: StaticHashRing<'static, String, usize, StableHash>,
    workers: Vec<RingWorker>,
}

impl Ring {
    /// A ring of these workers.
    pub fn new(workers: Vec<RingWorker>) -> Self {
        let node = |worker: &RingWorker| {
            Node::new(worker.name.clone()).value(worker.place).quantity(VIRTUAL_NODES * worker.weight)
        };
        let nodes: Vec<_> = workers.iter().map(node).collect();
        Self { ring: StaticHashRing::new(StableHash, nodes.into_iter()), workers }
    }

    /// Its workers.
    pub fn workers(&self) -> &[RingWorker] {
        &self.workers
    }

    /// Workers in the order in which a key falls to them, by their places.
    pub fn walk(&self, key: u64) -> impl Iterator<Item = usize> + '_ {
        self.ring.calc_candidates(&key).map(|node| node.value)
    }
}

/// Weights by measured speed: the slowest has 1, twice as fast is 2, rounded to powers of two. Of unknown speed is the slowest.
pub fn weights(speeds: &[f64]) -> Vec<usize> {
    let known = speeds.iter().copied().filter(|speed| *speed > 0.0);
    let slowest = known.fold(f64::INFINITY, f64::min);
    let weight = |&speed: &f64| {
        if speed <= 0.0 {
            return 1;
        }
        let power = (speed / slowest).log2().round().clamp(0.0, 63.0) as u32;
        (1_usize << power).min(MAX_WEIGHT)
    };
    speeds.iter().map(weight).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(weights: &[usize]) -> Ring {
        let worker = |(place, &weight): (usize, &usize)| RingWorker { name: format!("worker-{place}"), place, weight };
        Ring::new(weights.iter().enumerate().map(worker).collect())
    }

    fn first(ring: &Ring, key: u64) -> usize {
        ring.walk(key).next().unwrap()
    }

    #[test]
    fn the_walk_is_the_same_everywhere() {
        // Golden: a router of another release, or on another machine, must agree.
        let ring = ring(&[1, 1, 1, 1]);
        let walks: Vec<Vec<usize>> = [0, 1, u64::MAX].iter().map(|&key| ring.walk(key).collect()).collect();
        assert_eq!(walks, [[2, 0, 1, 3], [3, 2, 1, 0], [0, 1, 2, 3]]);
    }

    #[test]
    fn a_worker_that_leaves_moves_its_own_keys_and_no_others() {
        let (before, after) = (ring(&[1; 10]), ring(&[1; 9]));
        let keys = 0..10_000u64;
        let moved = keys.clone().filter(|&key| first(&before, key) != first(&after, key)).count();
        let had = keys.clone().filter(|&key| first(&before, key) == 9).count();
        assert_eq!(moved, had);
        assert!((700..1300).contains(&moved), "about a tenth: {moved}");
        // Its keys fall to many, in the order of the walk.
        let mut heirs: Vec<usize> =
            keys.filter(|&key| first(&before, key) == 9).map(|key| first(&after, key)).collect();
        heirs.sort_unstable();
        heirs.dedup();
        assert!(heirs.len() > 5, "{heirs:?}");
    }

    #[test]
    fn keys_fall_by_weight() {
        let ring = ring(&[1, 1, 4, 16]);
        let mut counts = [0usize; 4];
        (0..22_000u64).for_each(|key| counts[first(&ring, key)] += 1);
        for (count, weight) in counts.iter().zip([1, 1, 4, 16]) {
            assert!((count * 10).abs_diff(weight * 10_000) < weight * 3_000 + 2_000, "{counts:?}");
        }
    }

    #[test]
    fn weights_are_powers_of_two_of_the_slowest() {
        assert_eq!(weights(&[100.0, 190.0, 399.0, 1600.0, 0.0]), [1, 2, 4, 16, 1]);
        assert_eq!(weights(&[0.0, 0.0]), [1, 1]);
        assert_eq!(weights(&[1.0, 1e9]), [1, 64]);
    }
}
