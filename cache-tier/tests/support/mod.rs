//! What the tests of the tiers share: frames of a chain, and a place to put them.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use bytes::Bytes;
use cache_tier::{DiskConfig, DiskStore, Store};
use protocol::{
    BlockHash, BlockIdentity, BlockKey, KvFrame, Lookup, ModelFingerprint, NumericsClass, PutOutcome, PutReason, Salt,
};
use std::path::Path;

/// The identity of block `number` of a chain that no other number shares.
pub fn identity(number: u32) -> BlockIdentity {
    let parent = BlockHash::root(&Salt { adapter: None, cache_salt: number.to_string() });
    let token_ids: Box<[u32]> = (number..number + 16).collect();
    let key = BlockKey { model: ModelFingerprint::from_bytes([7; 32]), block: parent.child(&token_ids) };
    BlockIdentity { key, parent, token_ids }
}

/// The key of a block.
pub fn key(number: u32) -> BlockKey {
    identity(number).key
}

/// Bytes that only this block has.
pub fn payload(number: u32, len: usize) -> Bytes {
    let mut state = u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(next).collect()
}

/// A block.
pub fn frame(number: u32, len: usize) -> KvFrame {
    KvFrame::new(identity(number), NumericsClass::new("test"), payload(number, len))
}

/// Opens a store.
pub fn open(directory: &Path, capacity_bytes: u64) -> DiskStore {
    DiskStore::open(DiskConfig { directory: directory.to_owned(), capacity_bytes }).unwrap()
}

/// Puts blocks that must survive.
pub async fn put(store: &dyn Store, numbers: impl IntoIterator<Item = u32>, len: usize) -> Vec<PutOutcome> {
    store.put(numbers.into_iter().map(|number| frame(number, len)).collect(), PutReason::Drain).await
}

/// The block's payload as it would be taken up; `None` for a miss.
///
/// # Panics
/// When what is found is another block.
pub async fn take(store: &dyn Store, number: u32, len: usize) -> Option<Bytes> {
    match store.get(&[key(number)]).await.remove(0) {
        Lookup::Hit(frame) => {
            let raw = frame.open(&identity(number), len).unwrap();
            assert_eq!(raw, payload(number, len), "block {number} has another's bytes");
            Some(raw)
        }
        Lookup::Miss => None,
        Lookup::Busy => panic!("busy"),
    }
}
