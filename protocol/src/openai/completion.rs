//! `POST /v1/completions`.

use serde_json::Value;

use super::fields::{FieldError, Fields, shown, token_ids};
use super::sampling::{SamplingFields, count};

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
    /// Log probabilities of the answer's tokens, with this many of the likeliest.
    pub logprobs: Option<usize>,
    /// Whether the answer begins with the prompt.
    pub echo: bool,
    /// Answers to compute, of which the `n` likeliest are given.
    pub best_of: usize,
}

impl CompletionRequest {
    /// Parses a request body.
    ///
    /// # Errors
    /// The first field that is missing, of a wrong type, out of range or not served.
    pub fn parse(body: &Value) -> Result<Self, FieldError> {
        let fields = Fields::of(body)?;
        if fields.str("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(FieldError::new(
                "suffix",
                "is not supported: the model continues a prompt, it does not fill in",
            ));
        }
        let sampling = SamplingFields::parse(fields)?;
        Ok(Self {
            model: fields.str("model")?.map(str::to_owned),
            prompt: prompt(fields)?,
            // Older clients send a switch, which stands for one.
            logprobs: match fields.get("logprobs") {
                Some(Value::Bool(wanted)) => wanted.then_some(1),
                _ => fields.logprobs("logprobs")?,
            },
            echo: fields.bool("echo")?.unwrap_or(false),
            best_of: best_of(fields, &sampling)?,
            sampling,
        })
    }
}

fn best_of(fields: Fields<'_>, sampling: &SamplingFields) -> Result<usize, FieldError> {
    let Some(best_of) = count(fields, "best_of")? else { return Ok(sampling.n) };
    if best_of < sampling.n {
        return Err(FieldError::new("best_of", format!("must be at least n ({}), got {best_of}", sampling.n)));
    }
    if best_of > sampling.n && sampling.stream {
        return Err(FieldError::new("best_of", "cannot be streamed: the best is known at the end"));
    }
    Ok(best_of)
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
    fn the_best_are_chosen_from_at_least_as_many() {
        let parse = |fields: Value| {
            let mut body = json!({ "prompt": "a" });
            body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            CompletionRequest::parse(&body)
        };
        assert_eq!(parse(json!({ "n": 2 })).unwrap().best_of, 2);
        assert_eq!(parse(json!({ "n": 2, "best_of": 3, "logprobs": 0 })).unwrap().logprobs, Some(0));
        assert!(parse(json!({ "n": 3, "best_of": 2 })).unwrap_err().message.contains("at least n (3)"));
        assert!(parse(json!({ "best_of": 2, "stream": true })).is_err());
        assert!(parse(json!({ "suffix": "x" })).unwrap_err().to_string().contains("suffix"));
    }

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
