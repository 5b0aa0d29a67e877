//! Frames: golden bytes, what is refused and why.

use super::*;
use crate::Salt;

fn identity() -> BlockIdentity {
    let parent = BlockHash::root(&Salt::default());
    let token_ids: Box<[u32]> = (0..16).collect();
    let key = BlockKey { model: ModelFingerprint::from_bytes([7; 32]), block: parent.child(&token_ids) };
    BlockIdentity { key, parent, token_ids }
}

fn frame() -> KvFrame {
    let payload: Vec<u8> = (0..1000u32).flat_map(|i| (i as u16).to_le_bytes()).collect();
    KvFrame::new(identity(), NumericsClass::new("cpu-f32"), Bytes::from(payload))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Computed once with Python's `struct`, `blake3` and `xxhash` from the layout above.
#[test]
fn a_header_is_golden() {
    let bytes = frame().header.encode();
    assert_eq!(bytes.len(), 216);
    assert_eq!(hex(&bytes), GOLDEN.concat());
    assert_eq!(FrameHeader::parse(&bytes).unwrap(), (frame().header, 216));
}

const GOLDEN: [&str; 5] = [
    "50474b5601000100d8001000000000006370752d66333200000000000000000007070707070707070707070707070707",
    "07070707070707070707070707070707310bba08f31849c823f7748567210ae425ec0d27fba2191e6c481b2918179b6d",
    "e572dff82304700b856a555ac3a4558d0df3646a3727816500270a93c66aac1ed0070000d0070000aa2306ec9153f757",
    "000000000100000002000000030000000400000005000000060000000700000008000000090000000a0000000b000000",
    "0c0000000d0000000e0000000f000000521e5cee53140aa8",
];

#[test]
fn only_the_block_that_was_asked_for_is_opened() {
    let raw_len = frame().payload.len();
    assert_eq!(frame().open(&identity(), raw_len).unwrap(), frame().payload);
    let packed = frame().packed(Codec::Zstd);
    assert!(packed.payload.len() < raw_len);
    assert_eq!(packed.open(&identity(), raw_len).unwrap(), frame().payload);
    let refused = |change: &dyn Fn(&mut BlockIdentity)| {
        let mut other = identity();
        change(&mut other);
        frame().open(&other, raw_len).unwrap_err()
    };
    // A collision of names: everything but parent or tokens is equal.
    assert_eq!(refused(&|other| other.parent = BlockHash::from_bytes([1; 32])), FrameError::Foreign("parent"));
    assert_eq!(refused(&|other| other.token_ids[3] = 99), FrameError::Foreign("tokens"));
    assert_eq!(refused(&|other| other.key.block = other.parent), FrameError::Foreign("name"));
    assert_eq!(refused(&|other| other.key.model = ModelFingerprint::from_bytes([8; 32])), FrameError::Foreign("model"));
    assert_eq!(frame().open(&identity(), raw_len + 2).unwrap_err(), FrameError::Foreign("unpacked length"));
    let mut damaged = frame();
    let mut payload = damaged.payload.to_vec();
    payload[500] ^= 4;
    damaged.payload = Bytes::from(payload);
    assert_eq!(damaged.open(&identity(), raw_len).unwrap_err(), FrameError::Damaged("payload"));
    damaged.payload.truncate(10);
    assert_eq!(damaged.open(&identity(), raw_len).unwrap_err(), FrameError::Short { len: 10, needed: raw_len });
}

#[test]
fn every_flipped_bit_of_a_header_is_noticed() {
    let bytes = frame().header.encode();
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.to_vec();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(FrameHeader::parse(&flipped).is_err(), "bit {bit}");
    }
    for len in 0..bytes.len() {
        assert!(matches!(FrameHeader::parse(&bytes[..len]), Err(FrameError::Short { .. })), "{len} bytes");
    }
}

/// Changes bytes of a header and makes its checksum right again: what a later release, or a forger, would write.
fn rewritten(change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = frame().header.encode().to_vec();
    bytes.truncate(bytes.len() - 8);
    change(&mut bytes);
    let sum = XxHash3_64::oneshot(&bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

#[test]
fn a_later_release_may_add_but_not_change() {
    let longer = rewritten(|bytes| {
        bytes[4] = 2;
        bytes[8..10].copy_from_slice(&(216u16 + 12).to_le_bytes());
        bytes.extend([9; 12]);
    });
    assert_eq!(FrameHeader::parse(&longer).unwrap(), (frame().header, 228));
    let changed = FrameHeader::parse(&rewritten(|bytes| (bytes[4], bytes[6]) = (3, 2))).unwrap_err();
    assert!(changed.to_string().contains("version 3"), "{changed}");
    let codec = FrameHeader::parse(&rewritten(|bytes| bytes[12] = 77)).unwrap_err();
    assert_eq!(codec, FrameError::Codec(CodecError::Unknown(77)));
}

#[test]
fn forged_lengths_are_bounded() {
    for (at, len) in [(10, 2), (128, 4), (132, 4)] {
        let forged = rewritten(|bytes| bytes[at..at + len].fill(0xff));
        assert!(matches!(FrameHeader::parse(&forged), Err(FrameError::OutOfBounds { .. })), "at {at}");
    }
    let long = rewritten(|bytes| bytes[8..10].copy_from_slice(&4000u16.to_le_bytes()));
    assert!(matches!(FrameHeader::parse(&long), Err(FrameError::OutOfBounds { value: 4000, .. })));
}

#[test]
fn a_name_is_of_its_parent_and_tokens() {
    assert!(identity().is_consistent());
    let mut forged = identity();
    forged.token_ids[0] = 5;
    assert!(!forged.is_consistent());
}
