//! Prompts that were sent to our engines of late, and that they may not have told of yet.
//!
//! Filled by dispatch, read beside the exact index: a request that begins like one that is being computed goes to the same
//! worker. Invariant: bounded in number and age; a prompt costs its beginning's look-up and no more.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use protocol::PromptChain;

use crate::index::{Held, Slot};

/// Engines have told by then, or never will.
const BRIDGE: Duration = Duration::from_secs(5);
/// Prompts that are kept.
const MAX_PROMPTS: usize = 4096;
/// Of one beginning: the youngest say enough.
const MAX_ALIKE: usize = 16;

#[derive(Debug)]
struct Sent {
    slot: Slot,
    /// Of the chain's chunks.
    hashes: Box<[u64]>,
    at: Instant,
}

#[derive(Debug, Default)]
struct Books {
    /// By the hash of the first chunk, the oldest first.
    by_beginning: HashMap<u64, VecDeque<Sent>>,
    /// Beginnings in the order in which they were sent.
    order: VecDeque<(u64, Instant)>,
}

/// The prompts.
#[derive(Debug, Default)]
pub struct Recent(Mutex<Books>);

impl Recent {
    /// A prompt goes to a worker.
    pub fn sent(&self, slot: Slot, chain: &PromptChain) {
        let Some(first) = chain.chunks().first() else { return };
        let mut books = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = Instant::now();
        while books.order.len() >= MAX_PROMPTS || books.order.front().is_some_and(|(_, sent)| sent.elapsed() > BRIDGE) {
            let Some((beginning, sent)) = books.order.pop_front() else { break };
            if let Some(alike) = books.by_beginning.get_mut(&beginning) {
                while alike.front().is_some_and(|oldest| oldest.at <= sent) {
                    alike.pop_front();
                }
                if alike.is_empty() {
                    books.by_beginning.remove(&beginning);
                }
            }
        }
        books.order.push_back((first.hash, at));
        let alike = books.by_beginning.entry(first.hash).or_default();
        if alike.len() == MAX_ALIKE {
            alike.pop_front();
        }
        let hashes = chain.chunks().iter().map(|chunk| chunk.hash).collect();
        alike.push_back(Sent { slot, hashes, at });
    }

    /// How much of a prompt workers will hold soon.
    pub fn held(&self, chain: &PromptChain) -> Vec<Held> {
        let Some(first) = chain.chunks().first() else { return Vec::new() };
        let books = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(alike) = books.by_beginning.get(&first.hash) else { return Vec::new() };
        let held = |sent: &Sent| {
            let both = sent.hashes.iter().zip(chain.chunks());
            let num_chunks = both.take_while(|(hash, chunk)| **hash == chunk.hash).count();
            Held { slot: sent.slot, num_chunks, num_tokens: 0 }
        };
        alike.iter().filter(|sent| sent.at.elapsed() <= BRIDGE).map(held).collect()
    }

    /// A worker is gone, or has lost what it held.
    pub fn forget(&self, slot: Slot) {
        let mut books = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        books.by_beginning.retain(|_, alike| {
            alike.retain(|sent| sent.slot != slot);
            !alike.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::prompt_chain::{ChainKind, ChainRoot};

    fn chain(text: &str) -> PromptChain {
        let mut chain = PromptChain::new(&ChainRoot::new(ChainKind::Text, "m"));
        chain.push_text(text);
        chain
    }

    #[test]
    fn prompts_that_begin_alike_are_expected_where_the_first_went() {
        let recent = Recent::default();
        let shared = "x".repeat(600);
        recent.sent(3, &chain(&format!("{shared}a")));
        let of = |num_chunks| vec![Held { slot: 3, num_chunks, num_tokens: 0 }];
        assert_eq!(recent.held(&chain(&format!("{shared}b"))), of(2));
        assert_eq!(recent.held(&chain("y")), []);
        recent.forget(3);
        assert_eq!(recent.held(&chain(&format!("{shared}a"))), []);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let recent = Recent::default();
        (0..3 * MAX_PROMPTS).for_each(|number| recent.sent(1, &chain(&number.to_string())));
        (0..100).for_each(|_| recent.sent(2, &chain("the same")));
        let books = recent.0.lock().unwrap();
        assert!(books.order.len() <= MAX_PROMPTS && books.by_beginning.len() <= MAX_PROMPTS);
        assert_eq!(books.by_beginning.values().map(VecDeque::len).max(), Some(MAX_ALIKE));
    }
}
