//! Four bytes of UTF-8 a token, as a u32 LE: the tokeniser of simulated devices, whose token counts are then a pure
//! function of the text's length. A last token of fewer bytes is filled with 0xFF, which occurs in no UTF-8.

/// Every u32 is a token.
pub(super) const VOCAB_SIZE: usize = 1 << 32;
/// No byte at all.
pub(super) const EOS: u32 = u32::MAX;
const FILL: u8 = 0xff;

pub(super) fn encode(text: &str) -> Vec<u32> {
    let token = |bytes: &[u8]| {
        let mut filled = [FILL; 4];
        filled[..bytes.len()].copy_from_slice(bytes);
        u32::from_le_bytes(filled)
    };
    text.as_bytes().chunks(4).map(token).collect()
}

pub(super) fn token_bytes(id: u32) -> impl Iterator<Item = u8> {
    id.to_le_bytes().into_iter().filter(|byte| *byte != FILL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_comes_back() {
        for text in ["", "a", "four", "fünf€", "日本語\u{10ffff}"] {
            let tokens = encode(text);
            assert_eq!(tokens.len(), text.len().div_ceil(4));
            let bytes: Vec<u8> = tokens.into_iter().flat_map(token_bytes).collect();
            assert_eq!(bytes, text.as_bytes());
        }
        assert_eq!(token_bytes(EOS).count(), 0);
    }
}
