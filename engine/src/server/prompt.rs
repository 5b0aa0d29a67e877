//! From a parsed request to token ids: the chat template and the tokeniser.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::http::StatusCode;
use protocol::openai::{ChatRequest, Message, Prompt};

use super::Server;
use super::conversation::{ChainName, Content};
use super::error::ApiError;
use crate::announcer::PromptChunk;

/// A prompt, ready for the engine.
#[derive(Default)]
pub(super) struct Prepared {
    pub(super) token_ids: Vec<u32>,
    /// Where the chunks of its chain end.
    pub(super) chunks: Arc<[PromptChunk]>,
    /// As it was sent.
    pub(super) content: Content,
}

impl Server {
    /// A conversation's prompt, by the model's chat template; its chunks, where it has a name for routers.
    pub(super) async fn chat_prompt(
        self: &Arc<Self>,
        messages: Vec<Message>,
        add_generation_prompt: bool,
        name: Option<ChainName>,
    ) -> Result<Prepared, ApiError> {
        if self.chat_template.is_none() {
            let message = "this model's file has no chat template: use /v1/completions";
            return Err(ApiError::bad_request(message, "messages"));
        }
        let len = messages.iter().map(|message| message.content().len()).sum();
        self.check_text_bytes(len, "messages")?;
        self.prepare(move |server| {
            let Some(template) = &server.chat_template else { return Ok(Prepared::default()) };
            let text = template
                .render(&ChatRequest::messages_value(&messages), add_generation_prompt)
                .map_err(|error| ApiError::bad_request(error.to_string(), "messages"))?;
            // The template writes the special tokens itself.
            let token_ids = server.encode(&text, false, "messages")?;
            let content = Content::Messages(messages);
            let chunks = name.map(|name| content.chunks(server, &name, &text, &token_ids, 0)).unwrap_or_default();
            Ok(Prepared { token_ids, chunks: chunks.into(), content })
        })
        .await
    }

    /// A completion's prompt, which may be text.
    pub(super) async fn completion_prompt(
        self: &Arc<Self>,
        prompt: Prompt,
        name: ChainName,
    ) -> Result<Prepared, ApiError> {
        match prompt {
            Prompt::TokenIds(token_ids) => {
                let chunks = Content::TokenIds.chunks(self, &name, "", &token_ids, 0).into();
                Ok(Prepared { token_ids, chunks, content: Content::TokenIds })
            }
            Prompt::Text(text) => {
                self.check_text_bytes(text.len(), "prompt")?;
                self.prepare(move |server| {
                    let token_ids = server.encode(&text, true, "prompt")?;
                    let num_leading = server.num_leading(&text, &token_ids);
                    let content = Content::Text(text.clone());
                    let chunks = content.chunks(server, &name, &text, &token_ids, num_leading).into();
                    Ok(Prepared { token_ids, chunks, content })
                })
                .await
            }
        }
    }

    /// Tokens before those of a text: the beginning-of-sequence token, where the tokeniser put it there.
    pub(super) fn num_leading(&self, text: &str, token_ids: &[u32]) -> usize {
        let is_bos = token_ids.first().is_some_and(|&first| Some(first) == self.tokenizer.bos_token_id());
        let is_in_text =
            is_bos && token_ids.first().is_some_and(|&bos| text.starts_with(&self.tokenizer.decode(&[bos])));
        usize::from(is_bos && !is_in_text)
    }

    /// Token ids of a text.
    pub(super) async fn text_prompt(
        self: &Arc<Self>,
        text: String,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, ApiError> {
        self.check_text_bytes(text.len(), "prompt")?;
        self.prepare(move |server| server.encode(&text, add_special_tokens, "prompt")).await
    }

    /// Refuses, before any work on it, a text that no tokenisation brings under the longest sequence.
    fn check_text_bytes(&self, len: usize, param: &str) -> Result<(), ApiError> {
        let max_model_len = self.engine.max_model_len();
        let limit = max_model_len.saturating_mul(self.tokenizer.longest_token_bytes());
        if len <= limit {
            return Ok(());
        }
        let message =
            format!("{len} bytes of text are over this model's maximum context length of {max_model_len} tokens");
        Err(ApiError::too_long(message, param))
    }

    /// Templates and tokenising take long for long texts: they run beside the async workers, a few at a time.
    pub(super) async fn prepare<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let failed = |error: String| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error);
        let permit = Arc::clone(&self.preparing).acquire_owned().await.map_err(|error| failed(error.to_string()))?;
        let server = Arc::clone(self);
        let work = move || {
            let result = work(&server);
            drop(permit);
            result
        };
        tokio::task::spawn_blocking(work).await.map_err(|error| failed(error.to_string()))?
    }

    fn encode(&self, text: &str, add_special_tokens: bool, param: &str) -> Result<Vec<u32>, ApiError> {
        let ids = self.tokenizer.encode(text, add_special_tokens);
        let ids = ids.map_err(|error| ApiError::bad_request(error.to_string(), param))?;
        self.text_bytes.fetch_add(text.len() as u64, Ordering::Relaxed);
        self.text_tokens.fetch_add(ids.len() as u64, Ordering::Relaxed);
        Ok(ids)
    }
}
