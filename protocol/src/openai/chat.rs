//! `POST /v1/chat/completions`.

use serde_json::{Map, Value};

use super::fields::{FieldError, Fields, shown};
use super::sampling::SamplingFields;
use crate::prompt_chain::PromptChain;

/// One message as the chat template sees it: the client's object with `content` as one text.
#[derive(Clone, Debug, PartialEq)]
pub struct Message(pub Map<String, Value>);

/// A parsed request.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// The model asked for; `None` is the one there is.
    pub model: Option<String>,
    /// At least one.
    pub messages: Vec<Message>,
    /// How to answer.
    pub sampling: SamplingFields,
    /// Log probabilities of the answer's tokens, with this many of the likeliest.
    pub logprobs: Option<usize>,
}

impl ChatRequest {
    /// Parses a request body.
    ///
    /// # Errors
    /// The first field that is missing, of a wrong type, out of range or not served.
    pub fn parse(body: &Value) -> Result<Self, FieldError> {
        let fields = Fields::of(body)?;
        Ok(Self {
            model: fields.str("model")?.map(str::to_owned),
            messages: messages(fields)?,
            sampling: SamplingFields::parse(fields)?,
            logprobs: logprobs(fields)?,
        })
    }

    /// The messages as a template's value.
    pub fn messages_value(messages: &[Message]) -> Value {
        messages.iter().map(|message| Value::Object(message.0.clone())).collect()
    }
}

/// `logprobs` is a switch here, `top_logprobs` the number.
fn logprobs(fields: Fields<'_>) -> Result<Option<usize>, FieldError> {
    fields.refuse_unserved(&[("best_of", &[1.into()]), ("echo", &[false.into()])])?;
    let top = fields.logprobs("top_logprobs")?;
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    match top {
        Some(top) if top > 0 && !wanted => {
            Err(FieldError::new("top_logprobs", "is allowed only with `logprobs`: true"))
        }
        top => Ok(wanted.then_some(top.unwrap_or(0))),
    }
}

/// Parses the `messages` of a request: used by chat and by `/tokenize`.
pub(super) fn messages(fields: Fields<'_>) -> Result<Vec<Message>, FieldError> {
    let list = fields.array("messages")?.ok_or_else(|| FieldError::new("messages", "is required"))?;
    if list.is_empty() {
        return Err(FieldError::new("messages", "must not be empty"));
    }
    list.iter().enumerate().map(|(index, message)| parse_message(index, message)).collect()
}

impl Message {
    /// Its text.
    pub fn content(&self) -> &str {
        self.0.get("content").and_then(Value::as_str).unwrap_or_default()
    }

    /// Adds it to a prompt's chain.
    pub fn extend(&self, chain: &mut PromptChain) {
        let role = self.0.get("role").and_then(Value::as_str).unwrap_or_default();
        let rest = self.0.iter().filter(|(name, _)| !matches!(name.as_str(), "role" | "content"));
        chain.push_message(role, self.content(), rest);
    }

    /// The `messages` of any request body that has them.
    ///
    /// # Errors
    /// As [`ChatRequest::parse`].
    pub fn parse_all(body: &Value) -> Result<Vec<Self>, FieldError> {
        messages(Fields::of(body)?)
    }
}

fn parse_message(index: usize, message: &Value) -> Result<Message, FieldError> {
    let at = |field: &str| format!("messages[{index}]{field}");
    let object = message
        .as_object()
        .ok_or_else(|| FieldError::new(at(""), format!("expected an object, got {}", shown(message))))?;
    let role = object.get("role").and_then(Value::as_str);
    let role = role.ok_or_else(|| FieldError::new(at(".role"), "expected a string"))?;
    const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
    if !ROLES.contains(&role) {
        return Err(FieldError::new(at(".role"), format!("`{role}` is not one of {ROLES:?}")));
    }
    let content = match object.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => joined(&at(".content"), parts)?,
        None | Some(Value::Null) if role == "assistant" => String::new(),
        None | Some(Value::Null) => return Err(FieldError::new(at(".content"), "is required")),
        Some(other) => {
            let message = format!("expected a string or an array of parts, got {}", shown(other));
            return Err(FieldError::new(at(".content"), message));
        }
    };
    let mut object = object.clone();
    object.insert("content".into(), Value::String(content));
    // OpenAI's newer name for what every template calls the system.
    if role == "developer" {
        object.insert("role".into(), "system".into());
    }
    Ok(Message(object))
}

/// Text parts, joined; other kinds are refused by name.
fn joined(param: &str, parts: &[Value]) -> Result<String, FieldError> {
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        let param = format!("{param}[{index}]");
        match part.get("type").and_then(Value::as_str) {
            Some("text") => {}
            Some(kind) => return Err(FieldError::new(param, format!("parts of type `{kind}` are not supported"))),
            None => return Err(FieldError::new(param, "expected an object with a `type`")),
        }
        let part = part.get("text").and_then(Value::as_str);
        text.push_str(part.ok_or_else(|| FieldError::new(format!("{param}.text"), "expected a string"))?);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn error(body: &Value) -> String {
        ChatRequest::parse(body).unwrap_err().to_string()
    }

    #[test]
    fn parts_are_joined_and_the_developer_is_the_system() {
        let content = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]);
        let body = json!({ "messages": [{ "role": "developer", "content": content }], "seed": -1, "stop": "x" });
        let request = ChatRequest::parse(&body).unwrap();
        assert_eq!(ChatRequest::messages_value(&request.messages), json!([{ "role": "system", "content": "ab" }]));
        assert_eq!(request.sampling.seed, Some(u64::MAX));
        assert_eq!(request.sampling.stop, ["x"]);
    }

    #[test]
    fn errors_name_the_field_and_show_the_value() {
        let user = json!([{ "role": "user", "content": "hi" }]);
        assert_eq!(error(&json!([])), "`body`: expected a JSON object, got []");
        assert_eq!(error(&json!({})), "`messages`: is required");
        assert_eq!(error(&json!({ "messages": [] })), "`messages`: must not be empty");
        assert!(error(&json!({ "messages": [{ "role": "cat", "content": "" }] })).contains("messages[0].role"));
        assert_eq!(
            error(&json!({ "messages": user, "temperature": "hot" })),
            "`temperature`: expected a number, got \"hot\""
        );
        assert_eq!(error(&json!({ "messages": user, "top_p": 0 })), "`top_p`: must be above 0, at most 1, got 0");
        assert_eq!(error(&json!({ "messages": user, "max_tokens": 0 })), "`max_tokens`: must be at least 1, got 0");
        assert_eq!(error(&json!({ "messages": user, "n": 0 })), "`n`: must be at least 1, got 0");
        assert_eq!(error(&json!({ "messages": user, "n": 129 })), "`n`: must be at most 128, got 129");
        assert!(error(&json!({ "messages": user, "logit_bias": { "x": 1 } })).contains("logit_bias.x"));
        assert!(error(&json!({ "messages": user, "logit_bias": { "7": 101 } })).contains("-100 to 100, got 101"));
        assert!(error(&json!({ "messages": user, "top_logprobs": 2 })).contains("only with `logprobs`"));
        assert!(
            error(&json!({ "messages": user, "min_tokens": 9, "max_tokens": 8 }))
                .contains("0 to max_tokens (8), got 9")
        );
        assert!(error(&json!({ "messages": user, "best_of": 2 })).contains("best_of"));
        let tools = json!([{ "type": "function" }]);
        assert!(error(&json!({ "messages": user, "tools": tools })).contains("not supported by this server"));
        assert!(error(&json!({ "messages": user, "stream_options": {} })).contains("stream_options"));
        let image = json!([{ "role": "user", "content": [{ "type": "image_url" }] }]);
        assert!(error(&json!({ "messages": image })).contains("`image_url` are not supported"));
    }

    #[test]
    fn fields_that_ask_for_nothing_are_accepted() {
        let user = json!([{ "role": "user", "content": "hi" }]);
        let body =
            json!({ "messages": user, "n": 1, "presence_penalty": 0.0, "tools": [], "unknown": 1, "stop": null });
        assert!(ChatRequest::parse(&body).is_ok());
    }
}
