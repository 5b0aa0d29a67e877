//! Reads the traces beside this file.

/// One request.
#[allow(dead_code, reason = "each bench uses a part of it")]
pub struct Traced {
    /// Milliseconds since the start.
    pub at_ms: u64,
    /// Tokens of the prompt.
    pub input: u64,
    /// Tokens of the answer.
    pub output: u64,
    /// Names of its blocks of 512 tokens, in order.
    pub blocks: Vec<u64>,
}

/// The hour of chats.
pub fn conversation() -> Vec<Traced> {
    let bytes = zstd::stream::decode_all(&include_bytes!("mooncake_conversation.zst")[..]).unwrap();
    let mut bytes = bytes.into_iter();
    let mut number = || {
        let (mut value, mut shift) = (0u64, 0);
        loop {
            let byte = bytes.next().unwrap();
            value |= u64::from(byte & 127) << shift;
            shift += 7;
            if byte < 128 {
                return value;
            }
        }
    };
    let mut at_ms = 0;
    (0..number())
        .map(|_| {
            at_ms += number();
            let (input, output, count) = (number(), number(), number());
            let mut next = 0;
            let blocks = (0..count).map(|_| {
                let zigzag = number();
                let block = if zigzag % 2 == 0 { next + zigzag / 2 } else { next - zigzag.div_ceil(2) };
                next = block + 1;
                block
            });
            let blocks = blocks.collect();
            Traced { at_ms, input, output, blocks }
        })
        .collect()
}
