//! `POST /tokenize` and `POST /detokenize`, as vLLM's.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use protocol::openai::{FieldError, Fields, Message};
use serde_json::{Value, json};

use super::Shared;
use super::error::ApiError;

/// `{"prompt"}` or `{"messages"}` to token ids.
pub(super) async fn tokenize(State(server): Shared, body: Body) -> Result<Json<Value>, ApiError> {
    let body = server.json(body).await?;
    let fields = Fields::of(&body)?;
    server.check_model(fields.str("model")?)?;
    let tokens = match fields.str("prompt")? {
        Some(prompt) => {
            let add_special_tokens = fields.bool("add_special_tokens")?.unwrap_or(true);
            server.text_prompt(prompt.to_owned(), add_special_tokens).await?
        }
        None if fields.get("messages").is_some() => {
            let add_generation_prompt = fields.bool("add_generation_prompt")?.unwrap_or(true);
            server.chat_prompt(Message::parse_all(&body)?, add_generation_prompt, None).await?.token_ids
        }
        None => return Err(FieldError::new("prompt", "is required, or `messages`").into()),
    };
    let max_model_len = server.engine.max_model_len();
    Ok(Json(json!({ "count": tokens.len(), "max_model_len": max_model_len, "tokens": tokens })))
}

/// `{"tokens"}` to text.
pub(super) async fn detokenize(State(server): Shared, body: Body) -> Result<Json<Value>, ApiError> {
    let body = server.json(body).await?;
    let fields = Fields::of(&body)?;
    server.check_model(fields.str("model")?)?;
    let tokens = fields.token_ids("tokens")?.ok_or_else(|| FieldError::new("tokens", "is required"))?;
    let vocab_size = server.tokenizer.vocab_size();
    if let Some(id) = tokens.iter().find(|&&id| id as usize >= vocab_size) {
        return Err(FieldError::new("tokens", format!("id {id} is outside the vocabulary of {vocab_size}")).into());
    }
    Ok(Json(json!({ "prompt": server.tokenizer.decode(&tokens) })))
}
