//! Bodies: what goes in comes out, in pieces of any size, and nothing else does.

use super::*;
use crate::{BlockIdentity, NumericsClass, Salt};

fn frame(seed: u32, len: usize) -> KvFrame {
    let parent = BlockHash::root(&Salt::default());
    let token_ids: Box<[u32]> = (seed..seed + 16).collect();
    let key = BlockKey { model: ModelFingerprint::from_bytes([7; 32]), block: parent.child(&token_ids) };
    let payload = Bytes::from(vec![seed as u8; len]);
    KvFrame::new(BlockIdentity { key, parent, token_ids }, NumericsClass::new("test"), payload)
}

fn bytes_of(frame: &KvFrame) -> Vec<u8> {
    [&frame.header.encode()[..], &frame.payload].concat()
}

#[test]
fn keys_come_back() {
    let model = ModelFingerprint::from_bytes([3; 32]);
    let blocks = BlockHash::root(&Salt::default()).chain(&(0..64).collect::<Vec<u32>>(), 16);
    let body = encode_keys(&model, &blocks);
    let keys: Vec<BlockKey> = blocks.iter().map(|&block| BlockKey { model, block }).collect();
    assert_eq!(decode_keys(&body).unwrap(), keys);
    for len in 0..body.len() {
        assert!(matches!(decode_keys(&body[..len]), Err(WireError::Length { .. })), "{len}");
    }
    let mut forged = body.to_vec();
    forged[8..12].fill(0xff);
    assert_eq!(decode_keys(&forged), Err(WireError::TooManyKeys(u32::MAX as usize)));
    forged[0] = b'X';
    assert_eq!(decode_keys(&forged), Err(WireError::NotA("list of KV keys")));
}

#[test]
fn frames_come_back_whatever_the_pieces() {
    let frames = [frame(1, 5000), frame(2, 0), frame(3, 77)];
    let mut body = encode_put_header(PutReason::Drain).to_vec();
    frames.iter().for_each(|frame| body.extend(bytes_of(frame)));
    for piece in [1, 7, 200, 4096, body.len()] {
        let (mut decoder, mut reason, mut found) = (Decoder::default(), None, Vec::new());
        for chunk in body.chunks(piece) {
            decoder.push(chunk);
            if reason.is_none() {
                reason = decoder.put_header().unwrap();
            }
            while reason.is_some()
                && let Some(frame) = decoder.frame().unwrap()
            {
                found.push(frame);
            }
        }
        assert_eq!((reason, &found[..], decoder.is_empty()), (Some(PutReason::Drain), &frames[..], true), "{piece}");
    }
}

#[test]
fn answers_come_back_and_a_torn_one_is_not_whole() {
    let hit = Lookup::Hit(frame(4, 300));
    let mut body = Vec::new();
    for lookup in [&Lookup::Miss, &hit, &Lookup::Busy] {
        body.extend(encode_record(lookup));
        if let Lookup::Hit(frame) = lookup {
            body.extend(bytes_of(frame));
        }
    }
    let mut decoder = Decoder::default();
    let mut found = Vec::new();
    for byte in &body {
        decoder.push(&[*byte]);
        found.extend(decoder.record().unwrap());
    }
    assert_eq!((&found, decoder.is_empty()), (&vec![Lookup::Miss, hit, Lookup::Busy], true));
    // A reader that puts bytes where they belong gets the same, and no payload is written beyond its end.
    let (mut rest, mut again) = (&body[..], Vec::new());
    while !rest.is_empty() {
        let mut room = decoder.room();
        let (bytes, later) = rest.split_at(room.remaining_mut().min(rest.len()));
        room.put_slice(bytes);
        rest = later;
        while let Some(lookup) = decoder.record().unwrap() {
            again.push(lookup);
        }
    }
    assert_eq!((again, decoder.is_empty()), (found, true));
    let mut refused = Decoder::default();
    refused.push(&encode_refusal("another model"));
    assert_eq!(refused.record(), Err(WireError::Refused("another model".into())));
    let mut torn = Decoder::default();
    torn.push(&body[..100]);
    assert_eq!((torn.record().unwrap(), torn.record().unwrap()), (Some(Lookup::Miss), None));
    assert!(!torn.is_empty());
    let mut garbage = Decoder::default();
    garbage.push(b"HTTP/1.1 200 OK");
    assert_eq!(garbage.record(), Err(WireError::Unknown { what: "the status", value: b'H' }));
}
