//! Token by token to text: never splits a character, ends at stop texts.
//!
//! One per running request, fed by `Engine::step`. Invariant: the pieces it hands out, joined, are the answer's text; no
//! piece holds half a character or the beginning of a stop text.

use crate::tokenizer::Tokenizer;

/// Incremental decoder of one answer.
#[derive(Debug, Default)]
pub struct Detokenizer {
    stop: Vec<String>,
    /// The tail of a character that is not complete.
    incomplete: Vec<u8>,
    /// Text that may be the beginning of a stop text.
    held: String,
    include_stop: bool,
    stopped: bool,
}

impl Detokenizer {
    /// Ends at any of `stop`, which is part of the text where `include_stop`; empty texts are ignored.
    pub fn new(stop: &[String], include_stop: bool) -> Self {
        let stop = stop.iter().filter(|text| !text.is_empty()).cloned().collect();
        Self { stop, include_stop, ..Self::default() }
    }

    /// Whether a stop text was met.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Takes the next token; returns the text that is now certain. The text ends at a stop only where `may_stop`.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32, may_stop: bool) -> String {
        if tokenizer.is_control(token) {
            return String::new();
        }
        tokenizer.append_bytes(token, &mut self.incomplete);
        self.take_text(may_stop)
    }

    fn take_text(&mut self, may_stop: bool) -> String {
        let text = take_complete(&mut self.incomplete);
        if may_stop {
            return self.release(&text);
        }
        text
    }

    /// The answer is over: what was held back is part of it, an incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&std::mem::take(&mut self.incomplete)).into_owned();
        let mut text = self.release(&rest);
        if !self.stopped {
            text.push_str(&std::mem::take(&mut self.held));
        }
        text
    }

    fn release(&mut self, text: &str) -> String {
        if self.stopped {
            return String::new();
        }
        self.held.push_str(text);
        if let Some(at) = self.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.stopped = true;
            let at_end = |stop: &&String| self.held[at..].starts_with(stop.as_str());
            let stop_len = self.stop.iter().filter(at_end).map(String::len).min().unwrap_or(0);
            self.held.truncate(if self.include_stop { at + stop_len } else { at });
            return std::mem::take(&mut self.held);
        }
        let kept = self.stop.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - kept);
        std::mem::replace(&mut self.held, rest)
    }
}

/// Length of the longest end of `text` that is a beginning of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    (1..stop.len().min(text.len() + 1))
        .rev()
        .find(|&len| stop.is_char_boundary(len) && text.ends_with(&stop[..len]))
        .unwrap_or(0)
}

/// Takes the decodable front of `bytes`, leaving an incomplete last character; bytes that can never be valid become U+FFFD.
fn take_complete(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    loop {
        match std::str::from_utf8(bytes) {
            Ok(valid) => {
                text.push_str(valid);
                bytes.clear();
                return text;
            }
            Err(error) => {
                let valid: Vec<u8> = bytes.drain(..error.valid_up_to()).collect();
                text.push_str(&String::from_utf8_lossy(&valid));
                match error.error_len() {
                    None => return text,
                    Some(len) => {
                        bytes.drain(..len);
                        text.push(char::REPLACEMENT_CHARACTER);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(stop: &[&str], chunks: &[&[u8]]) -> (Vec<String>, bool) {
        let stop: Vec<String> = stop.iter().map(|&text| text.to_owned()).collect();
        let mut detokenizer = Detokenizer::new(&stop, false);
        let mut pieces: Vec<String> = chunks.iter().map(|chunk| push_bytes(&mut detokenizer, chunk, true)).collect();
        pieces.push(detokenizer.finish());
        (pieces, detokenizer.is_stopped())
    }

    fn push_bytes(detokenizer: &mut Detokenizer, bytes: &[u8], may_stop: bool) -> String {
        detokenizer.incomplete.extend_from_slice(bytes);
        detokenizer.take_text(may_stop)
    }

    #[test]
    fn a_stop_text_is_kept_where_asked_for_and_ignored_where_too_early() {
        let mut detokenizer = Detokenizer::new(&["bc".into(), "bcd".into()], true);
        assert_eq!(push_bytes(&mut detokenizer, b"abcde", true), "abc");
        assert!(detokenizer.is_stopped());
        let mut detokenizer = Detokenizer::new(&["bc".into()], false);
        assert_eq!(push_bytes(&mut detokenizer, b"abcde", false), "abcde");
        assert_eq!(push_bytes(&mut detokenizer, b"xbc", true), "x");
    }

    #[test]
    fn a_character_is_never_split() {
        let bytes = "é東".as_bytes();
        let (got, _) = pieces(&[], &[&bytes[..1], &bytes[1..3], &bytes[3..4], &bytes[4..]]);
        assert_eq!(got, ["", "é", "", "東", ""]);
    }

    #[test]
    fn invalid_bytes_are_replaced_and_the_rest_goes_on() {
        let (got, _) = pieces(&[], &[b"a\xff", b"b", b"\xe6\x9d"]);
        assert_eq!(got, ["a\u{fffd}", "b", "", "\u{fffd}"]);
    }

    #[test]
    fn a_stop_text_across_tokens_is_cut_and_its_beginnings_are_held() {
        let (got, stopped) = pieces(&["\nUser:"], &[b"hi\n", b"Us", b"er", b": x"]);
        assert_eq!((got.concat(), stopped), ("hi".to_owned(), true));
        let (got, stopped) = pieces(&["\nUser:"], &[b"hi\n", b"Use", b" it"]);
        assert_eq!(got, ["hi", "", "\nUse it", ""]);
        assert!(!stopped);
        let (got, stopped) = pieces(&["END"], &[b"the E", b"N"]);
        assert_eq!((got.concat(), stopped), ("the EN".to_owned(), false));
    }

    #[test]
    fn the_earliest_stop_wins() {
        let (got, _) = pieces(&["d", "bc"], &[b"abcd"]);
        assert_eq!(got.concat(), "a");
    }
}
