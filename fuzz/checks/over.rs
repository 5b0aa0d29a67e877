//! A fuzz target's check over its corpus, and over variations of each file of it.

use std::path::Path;

/// Every file of a corpus below `root`, and the same with each part of it cut off and each of some bits flipped, at so many
/// places, or at each byte where that is fewer.
pub fn over(root: &str, corpus: &str, variations: usize, check: fn(&[u8])) {
    let folder = Path::new(root).join("fuzz/corpus").join(corpus);
    let mut num_files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        check(&bytes);
        let variations = variations.min(bytes.len());
        for variation in 0..variations {
            let at = bytes.len() * variation / variations;
            check(&bytes[..at]);
            let mut flipped = bytes.clone();
            if let Some(byte) = flipped.get_mut(at) {
                *byte ^= 1 << (variation % 8);
            }
            check(&flipped);
        }
        num_files += 1;
    }
    assert!(num_files > 0, "the corpus of {corpus} is empty");
}
