//! The disk: what is stored comes back after a restart, what was damaged does not, and the cap holds.

mod support;

use cache_tier::{DiskConfig, DiskError, DiskStore, Store};
use protocol::{Lookup, PutOutcome, PutReason};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use support::{frame, key, open, put, take};

const LEN: usize = 10_000;

fn segments(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|e| e == "kvseg")).collect();
    paths.sort();
    paths
}

fn bytes_of(directory: &Path) -> u64 {
    segments(directory).iter().map(|path| path.metadata().unwrap().len()).sum()
}

/// Where a block's payload begins in a file, if it is there: slots are looked at where the first page says that they are.
fn found(path: &Path, number: u32) -> Option<u64> {
    let file = std::fs::File::open(path).unwrap();
    let number_at = |at: u64| {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from(u32::from_ne_bytes(bytes))
    };
    let [front, slot, count] = [16, 20, 24].map(number_at);
    let slots = 4096 + (front * count).next_multiple_of(4096);
    let start = support::payload(number, 32);
    let offsets = (0..count).map(|index| slots + index * slot + 216);
    offsets.into_iter().find(|&offset| {
        let mut bytes = [0; 32];
        file.read_exact_at(&mut bytes, offset).is_ok() && bytes == start[..]
    })
}

fn find(path: &Path, number: u32) -> u64 {
    found(path, number).unwrap()
}

fn flip(path: &Path, at: u64) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 8], at).unwrap();
}

#[tokio::test]
async fn blocks_come_back_after_a_restart_without_a_sync() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 4 << 20);
    assert_eq!(put(&store, 0..50, LEN).await, [PutOutcome::Stored; 50]);
    assert_eq!(put(&store, 0..1, LEN).await, [PutOutcome::Present]);
    assert!(take(&store, 49, LEN).await.is_some() && take(&store, 50, LEN).await.is_none());
    drop(store);
    let store = open(directory.path(), 4 << 20);
    for number in 0..50 {
        assert!(take(&store, number, LEN).await.is_some(), "{number}");
    }
    let stats = store.stats()[0];
    assert_eq!((stats.num_blocks, stats.hits), (50, 50));
    let keys: Vec<_> = (0..60).map(key).collect();
    assert_eq!(store.lookup(&keys).await.num_blocks, 50);
}

#[tokio::test]
async fn the_cap_holds_whatever_is_put_and_what_is_used_stays() {
    let directory = tempfile::tempdir().unwrap();
    let capacity = 2 << 20;
    let store = open(directory.path(), capacity);
    for number in 0..400 {
        // Of two sizes, which do not share segments.
        let len = if number % 3 == 0 { 3 * LEN } else { LEN };
        assert_eq!(put(&store, [number], len).await, [PutOutcome::Stored], "{number}");
        assert!(bytes_of(directory.path()) <= capacity, "{} bytes", bytes_of(directory.path()));
        take(&store, 1, LEN).await;
    }
    let stats = store.stats()[0];
    assert!(stats.evicted > 200 && stats.num_blocks > 50, "{stats:?}");
    assert!(take(&store, 1, LEN).await.is_some(), "used all the time");
    assert!(take(&store, 2, LEN).await.is_none(), "used never");
    let huge = put(&store, [9999], 3 << 20).await;
    assert_eq!(huge, [PutOutcome::Refused], "larger than the cap");
    drop(store);
    let smaller = open(directory.path(), 1 << 20);
    assert!(bytes_of(directory.path()) <= 1 << 20, "a smaller cap deletes");
    assert!(smaller.stats()[0].num_blocks > 0);
}

#[tokio::test]
async fn what_was_seen_once_is_not_written() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 4 << 20);
    let evicted = |number| store.put(vec![frame(number, LEN)], PutReason::Evict);
    assert_eq!(evicted(1).await, [PutOutcome::NotAdmitted]);
    assert_eq!((segments(directory.path()).len(), evicted(1).await), (0, vec![PutOutcome::Stored]));
    let through = store.put(vec![frame(2, LEN)], PutReason::WriteThrough).await;
    assert_eq!(through, [PutOutcome::Stored], "used twice by who puts it");
}

#[tokio::test]
async fn every_kind_of_damage_is_a_miss() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 4 << 20);
    put(&store, 0..8, LEN).await;
    drop(store);
    let path = segments(directory.path()).remove(0);
    // A flipped bit in a payload; one in a slot's header; one in a header at the front; two slots swapped.
    flip(&path, find(&path, 0) + 5000);
    flip(&path, find(&path, 1) - 100);
    flip(&path, 4096 + 2 * 256 + 70);
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let slots = [3, 4].map(|number| find(&path, number) - 216);
    let [mut a, mut b] = [vec![0; LEN + 216], vec![0; LEN + 216]];
    file.read_exact_at(&mut a, slots[0]).unwrap();
    file.read_exact_at(&mut b, slots[1]).unwrap();
    file.write_all_at(&b, slots[0]).unwrap();
    file.write_all_at(&a, slots[1]).unwrap();
    let store = open(directory.path(), 4 << 20);
    for number in 0..8 {
        let found = take(&store, number, LEN).await.is_some();
        assert_eq!(found, number > 4, "block {number}");
    }
    let stats = store.stats()[0];
    assert_eq!((stats.damaged, stats.num_blocks), (4, 3), "one was not found in the first place");
    assert_eq!(put(&store, 0..5, LEN).await, [PutOutcome::Stored; 5], "they are recomputed and stored anew");
    assert!(take(&store, 3, LEN).await.is_some());
}

#[tokio::test]
async fn a_block_that_is_put_again_replaces_a_damaged_one() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 4 << 20);
    put(&store, 0..3, LEN).await;
    let path = segments(directory.path()).remove(0);
    flip(&path, find(&path, 1) + 400);
    // As it goes over the network: the receiver finds out.
    let sent = store.get_to_send(&[key(1)]).await.remove(0).hit().unwrap();
    assert!(sent.check().is_err());
    drop(sent);
    assert_eq!(put(&store, 0..3, LEN).await, [PutOutcome::Present, PutOutcome::Stored, PutOutcome::Present]);
    assert!(take(&store, 1, LEN).await.is_some() && store.stats()[0].damaged == 1);
}

#[tokio::test]
async fn verify_finds_damage_and_drops_it_and_compact_gives_back() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 16 << 20);
    put(&store, 0..400, LEN).await;
    let files = segments(directory.path());
    assert!(files.len() > 3);
    flip(&files[0], find(&files[0], 5) + 77);
    let report = store.verify();
    assert_eq!((report.whole, report.damaged, report.problems.len()), (399, 1, 1), "{report:?}");
    assert!(report.problems[0].contains("slot 5: the payload"), "{}", report.problems[0]);
    assert_eq!((store.verify().whole, store.verify().damaged), (399, 0));
    assert_eq!(store.compact().await.deleted, 0, "nothing is nearly empty");
    // Damage most of two files: what is left of them fits elsewhere.
    for number in 0..400u32 {
        for path in files[..2].iter().filter(|_| !number.is_multiple_of(8) && number != 5) {
            if let Some(at) = found(path, number) {
                flip(path, at + 9);
            }
        }
    }
    let damaged = store.verify().damaged;
    let before = bytes_of(directory.path());
    let compacted = store.compact().await;
    assert!(damaged > 20 && compacted.deleted >= 1, "{damaged} {compacted:?}");
    assert_eq!(bytes_of(directory.path()), before - compacted.freed_bytes);
    assert_eq!(store.verify().whole, 399 - damaged);
    drop(store);
    let store = open(directory.path(), 16 << 20);
    assert_eq!((store.verify().whole, store.stats()[0].num_blocks), (399 - damaged, 399 - damaged));
    assert!(take(&store, 0, LEN).await.is_some() && take(&store, 399, LEN).await.is_some());
}

#[tokio::test]
async fn files_that_cannot_be_used_are_skipped_and_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 16 << 20);
    put(&store, 0..400, LEN).await;
    drop(store);
    let files = segments(directory.path());
    let rewrite = |path: &Path, at: u64, bytes: &[u8]| {
        std::fs::File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
    };
    rewrite(&files[0], 8, &9u32.to_ne_bytes());
    rewrite(&files[1], 12, &0x0403_0201u32.to_ne_bytes());
    std::fs::File::options().write(true).open(&files[2]).unwrap().set_len(100_000).unwrap();
    rewrite(&files[3], 24, &u32::MAX.to_ne_bytes());
    std::fs::write(directory.path().join("00000077.kvseg"), "no segment").unwrap();
    let store = open(directory.path(), 16 << 20);
    let left = store.stats()[0].num_blocks;
    assert!(left > 0 && left < 200, "{left}");
    assert_eq!(store.verify().whole, left);
    assert_eq!(put(&store, 1000..1010, LEN).await, [PutOutcome::Stored; 10]);
    assert!(segments(directory.path()).len() > files.len(), "none was deleted");
}

#[tokio::test]
async fn skipped_files_are_within_the_cap_and_give_way_to_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let junk = directory.path().join("00000000.kvseg");
    std::fs::write(&junk, vec![7; 3 << 19]).unwrap();
    let unfinished = directory.path().join("00000001.kvnew");
    std::fs::write(&unfinished, "half").unwrap();
    let store = open(directory.path(), 2 << 20);
    assert!(junk.exists() && !unfinished.exists());
    for number in 0..150 {
        put(&store, [number], LEN).await;
        assert!(bytes_of(directory.path()) <= 2 << 20, "{}", bytes_of(directory.path()));
    }
    assert!(!junk.exists() && store.stats()[0].num_blocks > 100, "{:?}", store.stats());
}

#[tokio::test]
async fn a_file_that_is_cut_short_while_it_is_mapped_is_a_miss() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 16 << 20);
    let len = 100_000;
    put(&store, 0..20, len).await;
    // Pinned slices of the map, as they wait for a socket.
    let keys: Vec<_> = (0..20).map(key).collect();
    let pinned = store.get_to_send(&keys).await;
    assert!(pinned.iter().all(|lookup| matches!(lookup, Lookup::Hit(frame) if frame.check().is_ok())));
    for path in segments(directory.path()) {
        std::fs::File::options().write(true).open(path).unwrap().set_len(30_000).unwrap();
    }
    // What reads them now gets zeros, which the receiver's checksum refuses.
    let whole = pinned.into_iter().filter_map(Lookup::hit).filter(|frame| frame.check().is_ok()).count();
    assert_eq!(whole, 0);
    for number in 0..20 {
        assert!(take(&store, number, len).await.is_none(), "{number}");
    }
    assert_eq!(store.stats()[0].num_blocks, 0, "the segments are given up");
    assert_eq!(put(&store, 0..3, len).await, [PutOutcome::Stored; 3]);
    assert!(take(&store, 2, len).await.is_some());
}

#[tokio::test]
async fn a_directory_belongs_to_one_and_its_loss_makes_no_caller_fail() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv");
    let store = open(&path, 2 << 20);
    let second = DiskStore::open(DiskConfig { directory: path.clone(), capacity_bytes: 2 << 20 });
    let error = second.map(|_| ()).unwrap_err();
    assert!(matches!(error, DiskError::InUse(_)) && error.to_string().contains("another process"), "{error}");
    put(&store, 0..3, LEN).await;
    std::fs::remove_dir_all(&path).unwrap();
    assert!(take(&store, 2, LEN).await.is_some(), "open files stay");
    let outcomes = put(&store, 10..500, LEN).await;
    assert!(outcomes.iter().all(|outcome| matches!(outcome, PutOutcome::Stored | PutOutcome::Busy)), "{outcomes:?}");
    drop(store);
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error =
        DiskStore::open(DiskConfig { directory: file.join("kv"), capacity_bytes: 2 << 20 }).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("file"), "{error}");
    let small = DiskStore::open(DiskConfig { directory: path, capacity_bytes: 1000 }).map(|_| ()).unwrap_err();
    assert!(small.to_string().contains("1000 bytes"), "{small}");
}

#[tokio::test]
async fn a_leased_block_outlives_what_comes_after_it() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 1 << 20);
    put(&store, 0..1, LEN).await;
    assert_eq!(store.lease(&[key(0), key(1)], 30_000).await, 1);
    put(&store, 1..300, LEN).await;
    assert!(take(&store, 0, LEN).await.is_some() && take(&store, 1, LEN).await.is_none());
}
