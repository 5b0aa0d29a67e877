//! A segment file of any bytes: skipped, or opened and read without a crash and without a block that is not whole.

use cache_tier::{DiskConfig, DiskStore, Store};

pub fn check(bytes: &[u8]) {
    let directory = std::env::temp_dir().join(format!("pagoda-segment-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join("00000000.kvseg"), bytes).unwrap();
    let store = DiskStore::open(DiskConfig { directory: directory.clone(), capacity_bytes: 64 << 20 }).unwrap();
    let found = store.stats()[0].num_blocks;
    let report = store.verify();
    assert!(report.whole + report.damaged <= found);
    assert_eq!(store.stats()[0].num_blocks, report.whole);
    drop(store);
    std::fs::remove_dir_all(&directory).unwrap();
}
