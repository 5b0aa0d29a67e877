//! A body of `/kv/v1` from any bytes: the same whatever the pieces, and nothing that is not in it.

use bytes::BufMut;
use protocol::kv_wire::{Decoder, WireError, decode_keys};
use protocol::{KvFrame, Lookup};

/// The next frame of a put, or the next answer to a get with its frame, if it has one; `None` until it is whole.
fn next(decoder: &mut Decoder, is_put: bool) -> Option<Result<Option<KvFrame>, WireError>> {
    let next = if is_put {
        decoder.frame().map(|frame| frame.map(Some))
    } else {
        decoder.record().map(|record| record.map(Lookup::hit))
    };
    next.transpose()
}

/// Gives a decoder some bytes: `piece` of them, or as many as it says that it wants.
fn feed<'a>(decoder: &mut Decoder, bytes: &'a [u8], piece: Option<usize>) -> &'a [u8] {
    let mut room = decoder.room();
    let (chunk, rest) = bytes.split_at(piece.unwrap_or(room.remaining_mut()).min(bytes.len()));
    match piece {
        Some(_) => decoder.push(chunk),
        None => room.put_slice(chunk),
    }
    rest
}

/// What a decoder makes of a body in pieces, up to its end or the first error: bytes of payload, and whether it failed.
fn decoded(mut bytes: &[u8], piece: Option<usize>, is_put: bool) -> (usize, usize, bool) {
    let (mut decoder, mut frames, mut payload, mut has_reason) = (Decoder::default(), 0, 0, !is_put);
    while !bytes.is_empty() {
        bytes = feed(&mut decoder, bytes, piece);
        if !has_reason {
            match decoder.put_header() {
                Ok(reason) => has_reason = reason.is_some(),
                Err(_) => return (frames, payload, true),
            }
        }
        if !has_reason {
            continue;
        }
        while let Some(frame) = next(&mut decoder, is_put) {
            let Ok(frame) = frame else { return (frames, payload, true) };
            frames += 1;
            payload += frame.map_or(0, |frame| frame.payload.len());
        }
    }
    (frames, payload, false)
}

pub fn check(bytes: &[u8]) {
    for is_put in [true, false] {
        let whole = decoded(bytes, Some(bytes.len()), is_put);
        assert!(whole.1 <= bytes.len());
        assert_eq!(decoded(bytes, Some(7), is_put), whole);
        assert_eq!(decoded(bytes, None, is_put), whole);
    }
    if let Ok(keys) = decode_keys(bytes) {
        assert!(keys.len() * 32 < bytes.len());
    }
}
