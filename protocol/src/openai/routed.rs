//! What a router needs of a request's body: read in one pass, text borrowed where it can be, everything else passed over.
//!
//! Used by the router alone; the engine parses the same body in full and refuses what is wrong with it. Invariant: the chain
//! that comes out is the one that the engine computes of the same body.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::prompt_chain::{ChainKind, ChainRoot, PromptChain};

/// A request's body as a router sees it.
#[derive(Clone, Debug, Default)]
pub struct RoutedRequest<'a> {
    /// The model asked for.
    pub model: Option<Cow<'a, str>>,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Answers wanted.
    pub n: usize,
    /// Longest answer, where one is given.
    pub max_tokens: Option<usize>,
    /// Whether the client chose a seed.
    pub has_seed: bool,
    /// Keeps KV state apart.
    pub cache_salt: Cow<'a, str>,
    /// Names a session or an end user, as OpenAI's `user`.
    pub user: Option<Cow<'a, str>>,
    /// Lower runs first.
    pub priority: i64,
    /// The adapter asked for.
    tools: Option<Value>,
    template_arguments: Option<Value>,
    content: Content<'a>,
}

#[derive(Clone, Debug, Default)]
enum Content<'a> {
    #[default]
    None,
    Messages(Vec<RoutedMessage<'a>>),
    Text(Cow<'a, str>),
    TokenIds(Vec<u32>),
}

#[derive(Clone, Debug, Default)]
struct RoutedMessage<'a> {
    role: Cow<'a, str>,
    content: Cow<'a, str>,
    rest: Map<String, Value>,
}

impl<'a> RoutedRequest<'a> {
    /// Reads a body of chat (`messages` count) or of another endpoint (`prompt` does).
    ///
    /// # Errors
    /// When it is no JSON object, or a field that decides where it goes has another type.
    pub fn parse(body: &'a [u8], is_chat: bool) -> Result<Self, serde_json::Error> {
        let mut deserializer = serde_json::Deserializer::from_slice(body);
        let request = deserializer.deserialize_map(RequestVisitor { is_chat })?;
        deserializer.end()?;
        Ok(request)
    }

    /// The chain of its content under a model's name and a salt.
    pub fn chain(&self, model: &str, cache_salt: &str) -> PromptChain {
        let kind = match &self.content {
            Content::Messages(_) => ChainKind::Chat,
            Content::TokenIds(_) => ChainKind::TokenIds,
            Content::Text(_) | Content::None => ChainKind::Text,
        };
        let (tools, template_arguments) = (self.tools.as_ref(), self.template_arguments.as_ref());
        let root = ChainRoot { cache_salt, tools, template_arguments, ..ChainRoot::new(kind, model) };
        let mut chain = PromptChain::new(&root);
        match &self.content {
            Content::None => {}
            Content::Messages(messages) => {
                messages
                    .iter()
                    .for_each(|message| chain.push_message(&message.role, &message.content, message.rest.iter()));
            }
            Content::Text(text) => chain.push_text(text),
            Content::TokenIds(token_ids) => chain.push_token_ids(token_ids),
        }
        chain
    }

    /// Which message is the user's first; 0 where there are none.
    pub fn first_user_message(&self) -> usize {
        match &self.content {
            Content::Messages(messages) => messages.iter().position(|message| message.role == "user").unwrap_or(0),
            _ => 0,
        }
    }
}

/// A string, borrowed where it has no escapes.
struct Text<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(TextVisitor)
    }
}

struct RequestVisitor {
    is_chat: bool,
}

impl<'de> Visitor<'de> for RequestVisitor {
    type Value = RoutedRequest<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let mut request = RoutedRequest { n: 1, ..Default::default() };
        while let Some(Text(name)) = fields.next_key::<Text<'de>>()? {
            match &*name {
                "model" => request.model = fields.next_value::<Option<Text<'de>>>()?.map(|text| text.0),
                "stream" => request.stream = fields.next_value::<Option<bool>>()?.unwrap_or(false),
                "n" => request.n = fields.next_value::<Option<usize>>()?.unwrap_or(1),
                "max_tokens" | "max_completion_tokens" => {
                    request.max_tokens = fields.next_value::<Option<usize>>()?.or(request.max_tokens);
                }
                "seed" => request.has_seed = !fields.next_value::<Value>()?.is_null(),
                "priority" => request.priority = fields.next_value::<Option<i64>>()?.unwrap_or(0),
                "cache_salt" => {
                    request.cache_salt =
                        fields.next_value::<Option<Text<'de>>>()?.map(|text| text.0).unwrap_or_default();
                }
                // A hint: whatever else it is, the engine does not look at it either.
                "user" => request.user = fields.next_value::<Value>()?.as_str().map(|user| Cow::Owned(user.to_owned())),
                "tools" => request.tools = fields.next_value()?,
                "chat_template_kwargs" => request.template_arguments = fields.next_value()?,
                // Null is as good as absent.
                "messages" if self.is_chat => {
                    request.content = fields.next_value_seed(Messages)?.map_or(Content::None, Content::Messages);
                }
                "prompt" if !self.is_chat => request.content = fields.next_value_seed(Prompt)?,
                _ => drop(fields.next_value::<IgnoredAny>()?),
            }
        }
        Ok(request)
    }
}

struct Messages;

impl<'de> DeserializeSeed<'de> for Messages {
    type Value = Option<Vec<RoutedMessage<'de>>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Messages {
    type Value = Option<Vec<RoutedMessage<'de>>>;

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of messages")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut messages = Vec::new();
        while let Some(message) = items.next_element_seed(Message)? {
            messages.push(message);
        }
        Ok(Some(messages))
    }
}

struct Message;

impl<'de> DeserializeSeed<'de> for Message {
    type Value = RoutedMessage<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Message {
    type Value = RoutedMessage<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a message")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let mut message = RoutedMessage::default();
        while let Some(Text(name)) = fields.next_key::<Text<'de>>()? {
            match &*name {
                "role" => message.role = fields.next_value::<Text<'de>>()?.0,
                "content" => message.content = fields.next_value_seed(MessageContent)?,
                _ => drop(message.rest.insert(name.into_owned(), fields.next_value()?)),
            }
        }
        Ok(message)
    }
}

/// A message's text: a string, parts of type `text` that are joined, or nothing.
struct MessageContent;

impl<'de> DeserializeSeed<'de> for MessageContent {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MessageContent {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of parts")
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.to_owned()))
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(""))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Self::Value, A::Error> {
        let mut text = String::new();
        while let Some(part) = parts.next_element::<Value>()? {
            match part.get("text").and_then(Value::as_str) {
                Some(part) => text.push_str(part),
                // Of another kind: an engine that takes it makes tokens of it in its own way, which this text stands for.
                None => text.push_str(&part.to_string()),
            }
        }
        Ok(Cow::Owned(text))
    }
}

/// A completion's prompt: a text, token ids, or a list of one of either.
struct Prompt;

impl<'de> DeserializeSeed<'de> for Prompt {
    type Value = Content<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Prompt {
    type Value = Content<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or token ids")
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Content::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Content::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(Content::None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let (mut token_ids, mut first) = (Vec::new(), None);
        while let Some(item) = items.next_element::<PromptItem<'de>>()? {
            match item {
                PromptItem::Id(id) => token_ids.push(id),
                other => first = first.or(Some(other)),
            }
        }
        Ok(match first {
            Some(PromptItem::Text(text)) => Content::Text(text),
            Some(PromptItem::Ids(ids)) => Content::TokenIds(ids),
            Some(PromptItem::Id(_)) | None => Content::TokenIds(token_ids),
        })
    }
}

enum PromptItem<'a> {
    Id(u32),
    Text(Cow<'a, str>),
    Ids(Vec<u32>),
}

impl<'de> Deserialize<'de> for PromptItem<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemVisitor;
        impl<'de> Visitor<'de> for ItemVisitor {
            type Value = PromptItem<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a token id or a list of token ids")
            }

            fn visit_u64<E: Error>(self, id: u64) -> Result<Self::Value, E> {
                u32::try_from(id).map(PromptItem::Id).map_err(|_| E::custom(format!("token id {id} is out of range")))
            }

            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(PromptItem::Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(PromptItem::Text(Cow::Owned(text.to_owned())))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = items.next_element()? {
                    ids.push(id);
                }
                Ok(PromptItem::Ids(ids))
            }
        }
        deserializer.deserialize_any(ItemVisitor)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::openai::{ChatRequest, CompletionRequest, Prompt as Parsed};

    fn root(kind: ChainKind) -> ChainRoot<'static> {
        ChainRoot { cache_salt: "s", ..ChainRoot::new(kind, "m") }
    }

    #[test]
    fn the_chain_is_that_of_the_engine() {
        let parts = json!([{ "type": "text", "text": "a\n" }, { "type": "text", "text": "b" }]);
        let body = json!({
            "temperature": 0.5, "model": "m", "prompt": "not of chat", "user": 5, "stream": true, "cache_salt": "s", "max_tokens": 7, "extra": { "a": [1] },
            "messages": [
                { "role": "developer", "content": parts },
                { "content": "quo\"te é", "name": "me", "role": "user" },
                { "role": "assistant", "content": null },
                { "role": "tool", "content": "x".repeat(600), "tool_call_id": "c" },
            ],
        });
        let text = body.to_string();
        let routed = RoutedRequest::parse(text.as_bytes(), true).unwrap();
        assert_eq!((routed.model.as_deref(), routed.stream, routed.max_tokens), (Some("m"), true, Some(7)));
        assert_eq!((routed.first_user_message(), &*routed.cache_salt, routed.has_seed), (1, "s", false));
        let parsed = ChatRequest::parse(&body).unwrap();
        let mut chain = PromptChain::new(&root(ChainKind::Chat));
        parsed.messages.iter().for_each(|message| message.extend(&mut chain));
        assert_eq!(routed.chain("m", "s"), chain);
        assert_eq!(chain.chunks().len(), 6);
    }

    #[test]
    fn prompts_are_text_or_token_ids() {
        for prompt in [json!("some text"), json!(["some text"]), json!([1, 2, 3]), json!([[1, 2, 3]])] {
            let body = json!({ "prompt": prompt, "messages": null });
            let text = body.to_string();
            let routed = RoutedRequest::parse(text.as_bytes(), false).unwrap().chain("m", "s");
            let mut chain = match CompletionRequest::parse(&body).unwrap().prompt {
                Parsed::Text(text) => {
                    let mut chain = PromptChain::new(&root(ChainKind::Text));
                    chain.push_text(&text);
                    chain
                }
                Parsed::TokenIds(_) => PromptChain::new(&root(ChainKind::TokenIds)),
            };
            if chain.chunks().is_empty() {
                chain.push_token_ids(&[1, 2, 3]);
            }
            assert_eq!(routed, chain, "{body}");
        }
    }

    #[test]
    fn what_is_no_request_is_an_error_with_its_place() {
        for (body, words) in [
            ("[]", "a JSON object"),
            (r#"{"model": 3}"#, "a string"),
            (r#"{"messages": {}}"#, "a list of messages"),
            (r#"{"messages": [1]}"#, "a message"),
            (r#"{"prompt": [-1]}"#, "token id"),
            (r#"{"stream": true"#, "EOF"),
            (r#"{"stream": true} x"#, "trailing"),
        ] {
            let error = RoutedRequest::parse(body.as_bytes(), !body.contains("prompt")).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("line 1"), "{body}: {error}");
        }
    }
}
