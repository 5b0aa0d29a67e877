//! The disk against a simple model: a map of what was stored. Whatever is done, what is found is what was put, the cap holds,
//! and a restart changes nothing.

mod support;

use cache_tier::Store;
use proptest::prelude::*;
use protocol::{PutOutcome, PutReason};
use std::collections::HashMap;
use support::{frame, open, take};

#[derive(Clone, Debug)]
enum Step {
    Put { number: u32, len: usize, reason: PutReason },
    Get(u32),
    Lease(u32),
    Restart,
    Compact,
}

fn step() -> impl Strategy<Value = Step> {
    let reason = proptest::sample::select(&PutReason::ALL[..]);
    let put = (0..40u32, proptest::sample::select(&[64usize, 3000, 40_000][..]), reason);
    prop_oneof![
        8 => put.prop_map(|(number, len, reason)| Step::Put { number, len, reason }),
        8 => (0..40u32).prop_map(Step::Get),
        1 => (0..40u32).prop_map(Step::Lease),
        1 => Just(Step::Restart),
        1 => Just(Step::Compact),
    ]
}

async fn run(steps: Vec<Step>) {
    let directory = tempfile::tempdir().unwrap();
    let capacity = 1 << 20;
    let mut store = open(directory.path(), capacity);
    // Lengths of the blocks that were stored: those that are found must be among them.
    let mut stored: HashMap<u32, usize> = HashMap::new();
    for step in steps {
        match step {
            Step::Put { number, len, reason } => {
                let len = *stored.get(&number).unwrap_or(&len);
                let outcome = store.put(vec![frame(number, len)], reason).await[0];
                if outcome == PutOutcome::Stored {
                    stored.insert(number, len);
                    assert!(take(&store, number, len).await.is_some(), "{number} was stored and is not found");
                }
                assert!(outcome != PutOutcome::Present || stored.contains_key(&number));
            }
            Step::Get(number) => match stored.get(&number) {
                Some(&len) => drop(take(&store, number, len).await),
                None => assert!(take(&store, number, 64).await.is_none()),
            },
            Step::Lease(number) => {
                let held = store.lookup(&[support::key(number)]).await.num_blocks;
                assert_eq!(store.lease(&[support::key(number)], 1).await, held);
            }
            Step::Restart => {
                let before = store.stats()[0].num_blocks;
                drop(store);
                store = open(directory.path(), capacity);
                assert_eq!(store.stats()[0].num_blocks, before);
            }
            Step::Compact => {
                let before = store.stats()[0].num_blocks;
                store.compact().await;
                assert_eq!(store.stats()[0].num_blocks, before);
            }
        }
        let stats = store.stats()[0];
        assert!(stats.used_bytes <= capacity && stats.damaged == 0, "{stats:?}");
    }
    let report = store.verify();
    assert_eq!((report.whole, report.damaged), (store.stats()[0].num_blocks, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_store_is_a_map_that_forgets(steps in proptest::collection::vec(step(), 1..80)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(steps));
    }
}
