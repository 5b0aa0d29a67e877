//! A frame's header from any bytes: refused or understood, and written again as it was read.

use protocol::kv_frame::{FrameHeader, MAX_HEADER, MAX_PAYLOAD, MAX_TOKENS};

pub fn check(bytes: &[u8]) {
    let Ok((header, len)) = FrameHeader::parse(bytes) else { return };
    assert!(len <= bytes.len() && len <= MAX_HEADER && header.encoded_len() <= len);
    assert!(header.identity.token_ids.len() <= MAX_TOKENS && header.payload_len.max(header.raw_len) <= MAX_PAYLOAD);
    let again = header.encode();
    assert_eq!(FrameHeader::parse(&again).unwrap(), (header, again.len()));
}
