//! What goes where: the one place that decides demotion, promotion and admission.
//!
//! Asked by the chain of places for each put and hit, and by the disk for admission. Pure.

use protocol::PutReason;
use serde::{Deserialize, Serialize};

/// A place that holds blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// The engine's pool on its device.
    Device,
    /// Memory of the host.
    Host,
    /// A local disk.
    Disk,
    /// Another process.
    Remote,
}

impl Place {
    /// As in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "disk",
            Self::Remote => "remote",
        }
    }
}

/// Whether a block that is put down for `reason` is offered to `place`, of the places that `there` are.
///
/// What was evicted goes to memory, from where it is found fastest, and on to what outlives the process, whose admission
/// keeps out what was seen once. What is written through is still on the device, so memory is passed over; so it is by what
/// must outlive the process. A preempted sequence is back soon: memory will do, where there is any.
pub fn goes_to(reason: PutReason, place: Place, there: &[Place]) -> bool {
    let has_host = there.contains(&Place::Host);
    let outlives = place > Place::Host;
    match reason {
        PutReason::Evict => true,
        PutReason::WriteThrough => outlives || there.iter().all(|&place| place <= Place::Host),
        PutReason::Drain | PutReason::Handoff => outlives,
        PutReason::Preempt => !has_host || place == Place::Host,
    }
}

/// The place, of those that `there` are, that a block which was found in `found` is copied up to: memory before all that is
/// slower, a disk before the network.
pub fn promotes_to(found: Place, there: &[Place]) -> Option<Place> {
    [Place::Host, Place::Disk].into_iter().find(|&place| place < found && there.contains(&place))
}

/// How often a put counts as a touch of its block: written through means used twice.
pub fn touches(reason: PutReason) -> u32 {
    match reason {
        PutReason::Evict => 1,
        PutReason::WriteThrough => 2,
        PutReason::Drain | PutReason::Preempt | PutReason::Handoff => ADMITTED,
    }
}

/// Touches from which a block is kept on a medium that wears out.
pub const ADMITTED: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use Place::{Device, Disk, Host, Remote};

    #[test]
    fn every_reason_has_its_places() {
        let all = [Host, Disk, Remote];
        let places = |reason, there: &[Place]| -> Vec<Place> {
            there.iter().copied().filter(|&place| goes_to(reason, place, there)).collect()
        };
        assert_eq!(places(PutReason::Evict, &all), all);
        assert_eq!(places(PutReason::WriteThrough, &all), [Disk, Remote]);
        assert_eq!(places(PutReason::WriteThrough, &[Host]), [Host], "memory is better than nothing");
        assert_eq!(places(PutReason::Drain, &all), [Disk, Remote], "memory ends with the process");
        assert_eq!(places(PutReason::Preempt, &all), [Host]);
        assert_eq!(places(PutReason::Preempt, &[Disk]), [Disk]);
        assert_eq!(places(PutReason::Handoff, &[Host, Remote]), [Remote]);
    }

    #[test]
    fn hits_move_up_one_place() {
        assert_eq!(promotes_to(Remote, &[Host, Disk, Remote]), Some(Host));
        assert_eq!(promotes_to(Remote, &[Disk, Remote]), Some(Disk));
        assert_eq!(promotes_to(Disk, &[Host, Disk]), Some(Host));
        assert_eq!((promotes_to(Host, &[Host, Disk]), promotes_to(Disk, &[Disk])), (None, None));
        assert!(Device < Host && Host < Disk && Disk < Remote);
    }

    #[test]
    fn what_was_used_once_is_not_admitted_unless_it_must_survive() {
        let admitted: Vec<bool> = PutReason::ALL.iter().map(|&reason| touches(reason) >= ADMITTED).collect();
        assert_eq!(admitted, [false, true, true, true, true]);
    }
}
