//! The loop's part of telling routers which prompts are held: names that blocks got and lost go to the announcer.
//!
//! Part of [`EngineLoop`]; done once a step, and for each request as it arrives.

use super::driver::EngineLoop;
use crate::announcer::Announcement;
use crate::sequence::RequestId;

impl EngineLoop {
    /// Withdraws what a new request's tokens contradict.
    pub(super) fn contradict(&mut self, id: RequestId) {
        if self.announcer.num_held() > 0
            && let Some(sequence) = self.engine.scheduler().waiting(id)
        {
            sequence.chunks().iter().for_each(|chunk| self.announcer.contradict(chunk.hash, sequence.block_hashes()));
        }
    }

    /// Tells what has changed since this was last called.
    pub(super) fn announce(&mut self) {
        let (forgotten, held) = self.engine.take_changes();
        // Blocks lose their names before a step computes, and get them after it.
        forgotten.iter().for_each(|block| self.announcer.forget(block));
        let pool = self.engine.scheduler().blocks().pool();
        // A step that failed one of its sequences has taken the names of its blocks again.
        let is_held = |announcement: &Announcement| pool.find(&announcement.block).is_some();
        held.into_iter().filter(is_held).for_each(|announcement| self.announcer.hold(announcement));
        self.announcer.publish();
    }

    /// Tells of chunks whose blocks are held.
    pub(super) fn announce_held(&mut self, announcements: Vec<Announcement>) {
        let pool = self.engine.scheduler().blocks().pool();
        for announcement in announcements {
            if pool.find(&announcement.block).is_some() {
                self.announcer.hold(announcement);
            }
        }
        self.announcer.publish();
    }
}
