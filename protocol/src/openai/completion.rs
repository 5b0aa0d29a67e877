//! `POST /v1/completions`.

use serde_json::Value;

use super::fields::{FieldError, Fields, shown, token_ids};
use super::sampling::SamplingFields;

/// A text, or its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// To be tokenised.
    Text(String),
    /// Tokenised already.
    TokenIds(Vec<u32>),
}

/// A parsed request.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// The model asked for; `None` is the one there is.
    pub model: Option<String>,
    /// What to continue.
    pub prompt: Prompt,
    /// How.
    pub sampling: SamplingFields,
}

impl CompletionRequest {
    /// Parses a request body.
    ///
    /// # Errors
    /// The first field that is missing, of a wrong type, out of range or not served.
    pub fn parse(body: &Value) -> Result<Self, FieldError> {
        let fields = Fields::of(body)?;
        Ok(Self {
            model: fields.str("model")?.map(str::to_owned),
            prompt: prompt(fields)?,
            sampling: SamplingFields::parse(fields)?,
        })
    }
}

/// A string, a list of token ids, or a list of exactly one of either.
fn prompt(fields: Fields<'_>) -> Result<Prompt, FieldError> {
    let value = fields.get("prompt").ok_or_else(|| FieldError::new("prompt", "is required"))?;
    let wrong =
        || FieldError::new("prompt", format!("expected a string or an array of token ids, got {}", shown(value)));
    match value {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(items) => match items.as_slice() {
            [Value::String(text)] => Ok(Prompt::Text(text.clone())),
            [Value::Array(ids)] => token_ids("prompt", ids).map(Prompt::TokenIds),
            [Value::String(_) | Value::Array(_), ..] => {
                let message = format!("{} prompts in one request are not supported, send one", items.len());
                Err(FieldError::new("prompt", message))
            }
            ids => token_ids("prompt", ids).map(Prompt::TokenIds),
        },
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_prompt_is_text_or_token_ids() {
        let prompt = |value: Value| CompletionRequest::parse(&json!({ "prompt": value })).map(|request| request.prompt);
        assert_eq!(prompt(json!("a")), Ok(Prompt::Text("a".into())));
        assert_eq!(prompt(json!(["a"])), Ok(Prompt::Text("a".into())));
        assert_eq!(prompt(json!([1, 2])), Ok(Prompt::TokenIds(vec![1, 2])));
        assert_eq!(prompt(json!([[1]])), Ok(Prompt::TokenIds(vec![1])));
        assert!(prompt(json!(["a", "b"])).unwrap_err().message.contains("2 prompts"));
        assert!(prompt(json!([-1])).is_err() && prompt(json!(7)).is_err() && prompt(Value::Null).is_err());
    }
}
