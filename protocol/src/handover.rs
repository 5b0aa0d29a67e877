//! What passes between a router and an engine beside the client's request and the answer, so that another engine can go on.
//!
//! The router adds one field to the body; the engine, on its internal listener only, puts a comment line before each event of
//! a stream, which tells what has been delivered with it. Invariant: a stream that is cut after any event can be continued
//! from the last comment, so that every token is delivered once.

use serde::{Deserialize, Serialize};

/// The field of the body.
pub const FIELD: &str = "pagoda";
/// The comment that ends a stream whose engine goes away: the router is to continue it elsewhere.
pub const HAND_OFF: &str = "pagoda hand-off";

/// The header of a whole answer, and the last comment of a stream: what an answer used.
pub const USED_HEADER: &str = "x-pagoda-used";

/// Tokens of an answer, for whoever compares what was expected with what came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Of the prompt.
    pub prompt_tokens: usize,
    /// Of those, what was found in a cache.
    pub cached_tokens: usize,
    /// Of the answer.
    pub completion_tokens: usize,
}

impl Used {
    /// Three numbers.
    pub fn encode(&self) -> String {
        format!("{} {} {}", self.prompt_tokens, self.cached_tokens, self.completion_tokens)
    }

    /// As a comment.
    pub fn comment(&self) -> String {
        format!("pagoda used {}", self.encode())
    }

    /// Reads three numbers.
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split(' ').map(str::parse);
        let mut next = || numbers.next()?.ok();
        Some(Self { prompt_tokens: next()?, cached_tokens: next()?, completion_tokens: next()? })
    }

    /// Reads a comment; `None` where it is another.
    pub fn of_comment(comment: &str) -> Option<Self> {
        Self::parse(comment.strip_prefix("pagoda used ")?)
    }
}

/// The comment before the chunk with the usage.
pub const USAGE_TOLD: &str = "pagoda usage";

/// What a router adds to a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Handover {
    /// Of the answer, whichever engines give it.
    pub id: String,
    /// When the request came, seconds since 1970.
    pub created: u64,
    /// Drawn where the client chose none, so that every engine draws the same tokens.
    pub seed: Option<u64>,
    /// In place of the client's.
    pub cache_salt: Option<String>,
    /// By answer, what has been delivered; empty for a request that begins.
    pub resume: Vec<Progress>,
    /// Whether the last chunk, with the usage, has been.
    pub usage_told: bool,
    /// Milliseconds since the client asked: a deadline of its own has begun then.
    pub elapsed_ms: u64,
}

/// How far an answer has come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Progress {
    /// Tokens generated.
    pub token_ids: Vec<u32>,
    /// Bytes of their text that have been delivered.
    pub text_bytes: usize,
    /// Whether anything has been: a role, or the prompt where it is echoed.
    pub begun: bool,
    /// Whether its end has been.
    pub finished: bool,
}

/// What one event of a stream delivers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// Which answer.
    pub index: usize,
    /// Bytes of the answer's text with it.
    pub text_bytes: usize,
    /// Whether it is the answer's end.
    pub finished: bool,
    /// Tokens since the last.
    pub token_ids: Vec<u32>,
}

impl Delivery {
    /// The comment's text: `pagoda INDEX BYTES END TOKEN,TOKEN,...`, END being 1 or 0.
    pub fn encode(&self) -> String {
        use std::fmt::Write;
        let Self { index, text_bytes, finished, token_ids } = self;
        let mut text = format!("pagoda {index} {text_bytes} {} ", u8::from(*finished));
        for (at, token) in token_ids.iter().enumerate() {
            // Writing to a string does not fail.
            let _written = write!(text, "{}{token}", if at == 0 { "" } else { "," });
        }
        text
    }

    /// Reads a comment; `None` where it is another.
    pub fn parse(comment: &str) -> Option<Self> {
        let mut words = comment.strip_prefix("pagoda ")?.split(' ');
        let index = words.next()?.parse().ok()?;
        let text_bytes = words.next()?.parse().ok()?;
        let finished = match words.next()? {
            "0" => false,
            "1" => true,
            _ => return None,
        };
        let list = words.next()?;
        let ids = list.split(',').filter(|id| !id.is_empty()).map(str::parse);
        Some(Self { index, text_bytes, finished, token_ids: ids.collect::<Result<_, _>>().ok()? })
    }
}

impl Progress {
    /// Adds what an event has delivered.
    pub fn note(&mut self, delivery: &Delivery) {
        self.token_ids.extend_from_slice(&delivery.token_ids);
        self.text_bytes = delivery.text_bytes;
        self.begun = true;
        self.finished = delivery.finished;
    }
}

impl Handover {
    /// A body with this as its last field, so that it stands above one of that name that the client sent. The body is a JSON
    /// object.
    pub fn added_to(&self, body: &[u8]) -> Vec<u8> {
        // It is numbers and texts, and always has a JSON.
        with_field(body, FIELD, &serde_json::to_vec(self).unwrap_or_default())
    }
}

/// A JSON object with one field more, which stands above one of that name.
pub fn with_field(object: &[u8], name: &str, value: &[u8]) -> Vec<u8> {
    let trimmed = object.trim_ascii_end();
    let object = trimmed.strip_suffix(b"}").unwrap_or(trimmed);
    let is_empty = object.trim_ascii() == b"{";
    let comma = if is_empty { &b""[..] } else { b"," };
    [object, comma, b"\"", name.as_bytes(), b"\":", value, b"}"].concat()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_comment_is_read_as_it_was_written_and_no_other_is() {
        for token_ids in [vec![], vec![7], vec![1, 2, 49_151]] {
            let delivery = Delivery { index: 3, text_bytes: 120, finished: token_ids.is_empty(), token_ids };
            assert_eq!(Delivery::parse(&delivery.encode()), Some(delivery));
        }
        for other in ["", "keep-alive", HAND_OFF, "pagoda 1 2 3 4", "pagoda 1 2 0", "pagoda 1 2 0 x", "pagoda -1 2 0 1"]
        {
            assert_eq!(Delivery::parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_field_of_that_name_from_the_client_is_not_heard() {
        let handover = Handover { id: "chatcmpl-1".into(), created: 5, ..Default::default() };
        for body in [r#"{"a": {"b": "}"}} "#, "{ }", r#"{"pagoda": {"id": "forged", "resume": [{}]}}"#] {
            let added: Value = serde_json::from_slice(&handover.added_to(body.as_bytes())).unwrap();
            assert_eq!(added[FIELD]["id"], json!("chatcmpl-1"));
            assert_eq!(added[FIELD]["resume"], json!([]));
            let (before, added) = (serde_json::from_str::<Value>(body).unwrap(), added.as_object().unwrap());
            assert!(before.as_object().unwrap().keys().all(|key| added.contains_key(key)));
        }
    }

    #[test]
    fn what_was_used_is_read_as_it_was_written() {
        let used = Used { prompt_tokens: 10, cached_tokens: 0, completion_tokens: 7 };
        assert_eq!((Used::parse(&used.encode()), Used::of_comment(&used.comment())), (Some(used), Some(used)));
        assert_eq!(
            (Used::parse("1 2"), Used::of_comment("pagoda 1 2 0 3"), Delivery::parse(&used.comment())),
            (None, None, None)
        );
    }

    #[test]
    fn progress_is_the_sum_of_deliveries() {
        let mut progress = Progress::default();
        progress.note(&Delivery { index: 0, text_bytes: 0, finished: false, token_ids: vec![] });
        progress.note(&Delivery { index: 0, text_bytes: 5, finished: false, token_ids: vec![1, 2] });
        progress.note(&Delivery { index: 0, text_bytes: 9, finished: true, token_ids: vec![3] });
        let expected = Progress { token_ids: vec![1, 2, 3], text_bytes: 9, begun: true, finished: true };
        assert_eq!(progress, expected);
    }
}
