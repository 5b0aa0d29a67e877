//! A stream of worker events from any bytes: the same whatever the pieces.

use protocol::WorkerEvent;
use protocol::worker_event::EventDecoder;

/// What is read of a stream in pieces, up to its end or the first error, and whether there was one.
fn read(bytes: &[u8], piece: usize) -> (Vec<WorkerEvent>, bool) {
    let (mut decoder, mut events) = (EventDecoder::default(), Vec::new());
    for part in bytes.chunks(piece) {
        decoder.push(part);
        loop {
            match decoder.next_event() {
                Ok(Some(event)) => events.push(event),
                Ok(None) => break,
                Err(_) => return (events, true),
            }
        }
    }
    (events, false)
}

pub fn check(bytes: &[u8]) {
    let whole = read(bytes, bytes.len().max(1));
    // Debug text, since a rate may be NaN.
    assert_eq!(format!("{:?}", read(bytes, 7)), format!("{whole:?}"));
    let held: usize = whole
        .0
        .iter()
        .map(|event| match event {
            WorkerEvent::Snapshot(chunks) => chunks.len(),
            WorkerEvent::Change { removed, stored, .. } => removed.len() + stored.len(),
            _ => 0,
        })
        .sum();
    assert!(held * 8 <= bytes.len());
}
