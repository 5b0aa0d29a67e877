//! Which worker each session was at last.
//!
//! Written when an answer ends, read when the next request comes. Invariant: bounded; the sessions that were quiet longest are
//! forgotten first, by halves.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Sessions of a half.
const HALF: usize = 32 << 10;

#[derive(Debug, Default)]
struct Halves {
    young: HashMap<String, Arc<str>>,
    old: HashMap<String, Arc<str>>,
}

/// The sessions.
#[derive(Debug, Default)]
pub struct Sessions(Mutex<Halves>);

impl Sessions {
    /// The worker that a session was at.
    pub fn get(&self, session: &str) -> Option<Arc<str>> {
        let halves = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        halves.young.get(session).or_else(|| halves.old.get(session)).cloned()
    }

    /// It is there now.
    pub fn set(&self, session: &str, worker: &Arc<str>) {
        let mut halves = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if halves.young.len() >= HALF {
            halves.old = std::mem::take(&mut halves.young);
        }
        halves.young.insert(session.to_owned(), Arc::clone(worker));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_of_late_is_remembered_and_no_more_than_two_halves() {
        let sessions = Sessions::default();
        let worker: Arc<str> = "a".into();
        (0..3 * HALF).for_each(|number| sessions.set(&number.to_string(), &worker));
        assert_eq!((sessions.get(&(3 * HALF - 1).to_string()), sessions.get("0")), (Some(worker), None));
        let halves = sessions.0.lock().unwrap();
        assert!(halves.young.len() + halves.old.len() <= 2 * HALF);
    }
}
