//! The prompt chain: a request's own content as a list of 64-bit hashes, each of a chunk and of all before it.
//!
//! Computed alike by the router, which has text, and by the engine, which knows in which KV block each chunk ends: so the
//! router knows what an engine holds without tokenising. A routing hint: KV is never looked up by it. Invariant: equal
//! prefixes of content have equal chain prefixes, and golden values pin the hashes.
//!
//! The root covers what decides how content becomes tokens: endpoint, model, adapter, salt, tools, template arguments. Each
//! message opens with its role and whatever else it has beside text; its text follows in chunks of 256 bytes, the last
//! one shorter.

use serde_json::Value;
use twox_hash::XxHash3_64;

/// Bytes of a chunk.
pub const CHUNK_BYTES: usize = 256;
/// Chunks of a chain: a prompt of a million tokens. What is beyond tells no two prompts apart that a router would keep apart.
pub const MAX_CHUNKS: usize = 16_384;
/// Token ids in a chunk of a prompt that is given as such.
pub const CHUNK_TOKEN_IDS: usize = CHUNK_BYTES / 4;

/// Which endpoint's rules make tokens of the content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainKind {
    /// Messages through a chat template.
    Chat,
    /// One text.
    Text,
    /// Token ids.
    TokenIds,
}

/// What all prompts must share to share anything.
#[derive(Clone, Copy, Debug)]
pub struct ChainRoot<'a> {
    /// Of the endpoint.
    pub kind: ChainKind,
    /// Name of the model.
    pub model: &'a str,
    /// Name of the adapter; empty for none.
    pub adapter: &'a str,
    /// The request's `cache_salt`.
    pub cache_salt: &'a str,
    /// The request's `tools`.
    pub tools: Option<&'a Value>,
    /// The request's `chat_template_kwargs`.
    pub template_arguments: Option<&'a Value>,
}

impl<'a> ChainRoot<'a> {
    /// Of a model, with nothing else that could differ.
    pub const fn new(kind: ChainKind, model: &'a str) -> Self {
        Self { kind, model, adapter: "", cache_salt: "", tools: None, template_arguments: None }
    }
}

/// A chunk in its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Of it and of all before it.
    pub hash: u64,
    /// Which message.
    pub message: u32,
    /// Bytes of the message's text up to its end.
    pub end: u32,
}

/// A prompt's chain, built message by message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptChain {
    hash: u64,
    num_messages: u32,
    num_bytes: usize,
    chunks: Vec<Chunk>,
}

impl PromptChain {
    /// The chain of nothing.
    pub fn new(root: &ChainRoot<'_>) -> Self {
        let mut bytes = b"pagoda-chain-1".to_vec();
        bytes.push(match root.kind {
            ChainKind::Chat => 0,
            ChainKind::Text => 1,
            ChainKind::TokenIds => 2,
        });
        for part in [root.model, root.adapter, root.cache_salt] {
            append_part(&mut bytes, part);
        }
        for value in [root.tools, root.template_arguments] {
            let mut text = String::new();
            if let Some(value) = value.filter(|value| !asks_for_nothing(value)) {
                append_canonical(&mut text, value);
            }
            append_part(&mut bytes, &text);
        }
        Self { hash: XxHash3_64::oneshot(&bytes), num_messages: 0, num_bytes: 0, chunks: Vec::new() }
    }

    /// Adds a message; `rest` is what it has beside `role` and `content`, in any order.
    pub fn push_message<'a>(&mut self, role: &str, content: &str, rest: impl Iterator<Item = (&'a String, &'a Value)>) {
        // OpenAI's newer name for what every template calls the system.
        let role = if role == "developer" { "system" } else { role };
        let mut opening = Vec::with_capacity(64);
        append_part(&mut opening, role);
        let mut rest: Vec<_> = rest.collect();
        rest.sort_by_key(|(name, _)| *name);
        for (name, value) in rest {
            append_part(&mut opening, name);
            let mut text = String::new();
            append_canonical(&mut text, value);
            append_part(&mut opening, &text);
        }
        self.open(&opening);
        self.push_bytes(content.as_bytes());
    }

    /// Adds the one text of a completion's prompt.
    pub fn push_text(&mut self, text: &str) {
        self.open(&[]);
        self.push_bytes(text.as_bytes());
    }

    /// Adds a prompt of token ids.
    pub fn push_token_ids(&mut self, token_ids: &[u32]) {
        self.open(&[]);
        let bytes: Vec<u8> = token_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.push_bytes(&bytes);
    }

    /// The chunks in order.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Bytes of all content.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    fn open(&mut self, opening: &[u8]) {
        self.hash = extended(self.hash, opening);
        self.num_messages += 1;
    }

    fn push_bytes(&mut self, bytes: &[u8]) {
        self.num_bytes += bytes.len();
        if self.chunks.len() >= MAX_CHUNKS {
            return;
        }
        let message = self.num_messages - 1;
        let mut end = 0;
        // A message without text is a chunk too: it may be all that tells two prompts apart.
        let empty = bytes.is_empty().then_some(&[][..]);
        for chunk in bytes.chunks(CHUNK_BYTES).chain(empty).take(MAX_CHUNKS - self.chunks.len()) {
            self.hash = extended(self.hash, chunk);
            end += chunk.len() as u32;
            self.chunks.push(Chunk { hash: self.hash, message, end });
        }
    }
}

/// XXH3-64 of a parent's hash, little-endian, and some bytes.
fn extended(parent: u64, bytes: &[u8]) -> u64 {
    let mut buffer = [0; 8 + CHUNK_BYTES];
    buffer[..8].copy_from_slice(&parent.to_le_bytes());
    match buffer.get_mut(8..8 + bytes.len()) {
        Some(room) => {
            room.copy_from_slice(bytes);
            XxHash3_64::oneshot(&buffer[..8 + bytes.len()])
        }
        None => XxHash3_64::oneshot(&[&buffer[..8], bytes].concat()),
    }
}

fn append_part(bytes: &mut Vec<u8>, part: &str) {
    bytes.extend((part.len() as u64).to_le_bytes());
    bytes.extend(part.as_bytes());
}

fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// JSON without spaces, the fields of objects by name.
fn append_canonical(text: &mut String, value: &Value) {
    match value {
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                text.push(if index == 0 { '[' } else { ',' });
                append_canonical(text, item);
            }
            text.push_str(if items.is_empty() { "[]" } else { "]" });
        }
        Value::Object(fields) => {
            let mut names: Vec<&String> = fields.keys().collect();
            names.sort();
            for (index, name) in names.iter().enumerate() {
                text.push(if index == 0 { '{' } else { ',' });
                text.push_str(&Value::from(name.as_str()).to_string());
                text.push(':');
                append_canonical(text, &fields[name.as_str()]);
            }
            text.push_str(if fields.is_empty() { "{}" } else { "}" });
        }
        simple => text.push_str(&simple.to_string()),
    }
}

#[cfg(test)]
mod tests;
