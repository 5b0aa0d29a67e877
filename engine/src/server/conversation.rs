//! What is known of a prompt's content beside its tokens: its chain for routers, and what an answer adds to it.
//!
//! Made with the prompt, used when its answer is complete: the conversation is rendered once more with the answer in it, and
//! as far as its tokens are those that were computed, it is announced. Done only where a router listens.

use std::sync::Arc;

use protocol::openai::{ChatRequest, Message};
use protocol::prompt_chain::{ChainKind, ChainRoot};
use protocol::{BlockHash, PromptChain, Salt};
use serde_json::{Value, json};

use super::{Server, chain};
use crate::announcer::{Announcement, PromptChunk};
use crate::kv::BLOCK_SIZE;

/// What prompts must share besides content to share KV blocks.
#[derive(Clone, Debug)]
pub(super) struct ChainName {
    /// The model, as the request calls it.
    pub(super) model: String,
    /// Its `cache_salt`.
    pub(super) cache_salt: String,
}

impl ChainName {
    fn chain(&self, kind: ChainKind) -> PromptChain {
        PromptChain::new(&ChainRoot { cache_salt: &self.cache_salt, ..ChainRoot::new(kind, &self.model) })
    }
}

/// A prompt's content, as the client sent it.
#[derive(Clone, Debug, Default)]
pub(super) enum Content {
    Messages(Vec<Message>),
    Text(String),
    #[default]
    TokenIds,
}

impl Content {
    /// Where its chunks end in its tokens; `rendered` is what was tokenised, after `num_leading` tokens.
    pub(super) fn chunks(
        &self,
        server: &Server,
        name: &ChainName,
        rendered: &str,
        token_ids: &[u32],
        num_leading: usize,
    ) -> Vec<PromptChunk> {
        let tokenizer = &server.tokenizer;
        match self {
            Self::Messages(messages) => {
                let mut all = name.chain(ChainKind::Chat);
                messages.iter().for_each(|message| message.extend(&mut all));
                let texts: Vec<&str> = messages.iter().map(Message::content).collect();
                chain::located(&all, &texts, rendered, token_ids, num_leading, tokenizer)
            }
            Self::Text(text) => {
                let mut all = name.chain(ChainKind::Text);
                all.push_text(text);
                chain::located(&all, &[text], rendered, token_ids, num_leading, tokenizer)
            }
            Self::TokenIds => {
                let mut all = name.chain(ChainKind::TokenIds);
                all.push_token_ids(token_ids);
                chain::of_token_ids(&all)
            }
        }
    }
}

/// A prompt whose answer is on its way.
pub(super) struct Conversation {
    server: Arc<Server>,
    content: Content,
    name: ChainName,
    prompt: Vec<u32>,
}

impl Conversation {
    /// Keeps what is needed when the answer is there; `None` where no router listens.
    pub(super) fn keep(server: &Arc<Server>, content: Content, name: ChainName, prompt: &[u32]) -> Option<Self> {
        let server = Arc::clone(server);
        server.has_event_readers().then(|| Self { server, content, name, prompt: prompt.to_vec() })
    }

    /// Announces the conversation with its answer, beside whatever else goes on.
    pub(super) fn answered(self, text: String, generated: Vec<u32>) {
        tokio::spawn(async move {
            let Self { server, content, name, mut prompt } = self;
            prompt.extend(generated);
            // New prompts go first: where many answers end at once, some are not told of.
            let Ok(turn) = Arc::clone(&server.announcing).try_acquire_owned() else { return };
            let rendering = Arc::clone(&server);
            let work = move || announcements(&rendering, content, &name, &prompt, text);
            if let Ok(announcements) = tokio::task::spawn_blocking(work).await
                && !announcements.is_empty()
            {
                server.engine.announce(announcements).await;
            }
            drop(turn);
        });
    }
}

/// What is known of a conversation whose tokens were computed, with its answer.
fn announcements(
    server: &Server,
    content: Content,
    name: &ChainName,
    computed: &[u32],
    answer: String,
) -> Vec<Announcement> {
    let (content, rendered) = match (content, &server.chat_template) {
        (Content::Messages(mut messages), Some(template)) => {
            let Value::Object(message) = json!({ "role": "assistant", "content": answer }) else { return Vec::new() };
            messages.push(Message(message));
            let Ok(rendered) = template.render(&ChatRequest::messages_value(&messages), false) else {
                return Vec::new();
            };
            (Content::Messages(messages), rendered)
        }
        (Content::Text(text), _) => {
            let text = text + &answer;
            (Content::Text(text.clone()), text)
        }
        (content, _) => (content, String::new()),
    };
    let (token_ids, num_leading) = match &content {
        Content::TokenIds => (computed.to_vec(), 0),
        content => {
            let is_text = matches!(content, Content::Text(_));
            let Ok(token_ids) = server.tokenizer.encode(&rendered, is_text) else { return Vec::new() };
            let num_leading = if is_text { server.num_leading(&rendered, &token_ids) } else { 0 };
            (token_ids, num_leading)
        }
    };
    let num_equal = token_ids.iter().zip(computed).take_while(|(a, b)| a == b).count();
    let root = BlockHash::root(&Salt { adapter: None, cache_salt: name.cache_salt.clone() });
    let blocks = root.chain(&token_ids[..num_equal], BLOCK_SIZE);
    let chunks = content.chunks(server, name, &rendered, &token_ids, num_leading);
    let known = chunks.into_iter().take_while(|chunk| chunk.num_tokens as usize <= num_equal);
    known.filter_map(|chunk| Some(Announcement { chunk, block: *blocks.get(chunk.block_index(BLOCK_SIZE))? })).collect()
}
