//! The fields that chat and text completions share: how tokens are chosen, when to stop, whether to stream.

use serde_json::{Value, json};

use super::fields::{FieldError, Fields};

/// Parsed and within range.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingFields {
    /// Default 1, as OpenAI's.
    pub temperature: f32,
    /// `None` is all tokens.
    pub top_k: Option<usize>,
    /// In (0, 1].
    pub top_p: f32,
    /// In [0, 1].
    pub min_p: f32,
    /// `None`: the server draws one.
    pub seed: Option<u64>,
    /// `None`: the endpoint's default.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Tokens that end it.
    pub stop_token_ids: Vec<u32>,
    /// Go on past the model's end tokens.
    pub ignore_eos: bool,
    /// Server-sent events.
    pub stream: bool,
    /// A last chunk with the usage.
    pub include_usage: bool,
}

/// More stop texts than this are refused: each is searched for in every piece of text.
const MAX_STOPS: usize = 64;
/// Bytes of one stop text: as much of an answer may be held back.
const MAX_STOP_BYTES: usize = 1024;
/// Each is compared with every token.
const MAX_STOP_TOKEN_IDS: usize = 128;

impl SamplingFields {
    pub(super) fn parse(fields: Fields<'_>) -> Result<Self, FieldError> {
        refuse_unserved(fields)?;
        let max_tokens = match fields.positive("max_completion_tokens")? {
            Some(tokens) => Some(tokens),
            None => fields.positive("max_tokens")?,
        };
        let top_k = match fields.integer("top_k")? {
            None | Some(-1 | 0) => None,
            Some(k) if k < 0 => {
                return Err(FieldError::new("top_k", format!("must be at least 1, or -1 for all, got {k}")));
            }
            Some(k) => Some(usize::try_from(k).unwrap_or(usize::MAX)),
        };
        let stream = fields.bool("stream")?.unwrap_or(false);
        let options = fields.object("stream_options")?;
        if options.is_some() && !stream {
            return Err(FieldError::new("stream_options", "is allowed only with `stream`: true"));
        }
        let include_usage = match options {
            Some(options) => options.bool("include_usage")?.unwrap_or(false),
            None => false,
        };
        let temperature = fields.number("temperature", "at least 0", |t| t >= 0.0)?;
        let top_p = fields.number("top_p", "above 0, at most 1", |p| p > 0.0 && p <= 1.0)?;
        let min_p = fields.number("min_p", "0 to 1", |p| (0.0..=1.0).contains(&p))?;
        Ok(Self {
            temperature: temperature.unwrap_or(1.0) as f32,
            top_k,
            top_p: top_p.unwrap_or(1.0) as f32,
            min_p: min_p.unwrap_or(0.0) as f32,
            seed: fields.integer("seed")?.map(|seed| seed as u64),
            max_tokens,
            stop: stop(fields)?,
            stop_token_ids: stop_token_ids(fields)?,
            ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
            stream,
            include_usage,
        })
    }
}

fn stop(fields: Fields<'_>) -> Result<Vec<String>, FieldError> {
    let texts = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(texts)) => texts
            .iter()
            .map(|text| text.as_str().map(str::to_owned))
            .collect::<Option<Vec<String>>>()
            .ok_or_else(|| FieldError::new("stop", "expected a string or an array of strings"))?,
        Some(other) => {
            let message = format!("expected a string or an array of strings, got {}", super::fields::shown(other));
            return Err(FieldError::new("stop", message));
        }
    };
    if texts.len() > MAX_STOPS {
        return Err(FieldError::new("stop", format!("has {} texts, at most {MAX_STOPS} are allowed", texts.len())));
    }
    if let Some(text) = texts.iter().find(|text| text.len() > MAX_STOP_BYTES) {
        return Err(FieldError::new(
            "stop",
            format!("a text has {} bytes, at most {MAX_STOP_BYTES} are allowed", text.len()),
        ));
    }
    if texts.iter().any(String::is_empty) {
        return Err(FieldError::new("stop", "an empty text would end every answer"));
    }
    Ok(texts)
}

fn stop_token_ids(fields: Fields<'_>) -> Result<Vec<u32>, FieldError> {
    let count = fields.array("stop_token_ids")?.map_or(0, Vec::len);
    if count > MAX_STOP_TOKEN_IDS {
        return Err(FieldError::new(
            "stop_token_ids",
            format!("has {count} ids, at most {MAX_STOP_TOKEN_IDS} are allowed"),
        ));
    }
    Ok(fields.token_ids("stop_token_ids")?.unwrap_or_default())
}

/// Fields of OpenAI's and vLLM's API that would change the answer, and that this server does not serve.
fn refuse_unserved(fields: Fields<'_>) -> Result<(), FieldError> {
    fields.refuse_unserved(&[
        ("n", &[json!(1)]),
        ("best_of", &[json!(1)]),
        ("logprobs", &[json!(false)]),
        ("top_logprobs", &[json!(0)]),
        ("prompt_logprobs", &[]),
        ("presence_penalty", &[json!(0)]),
        ("frequency_penalty", &[json!(0)]),
        ("repetition_penalty", &[json!(1)]),
        ("logit_bias", &[json!({})]),
        ("min_tokens", &[json!(0)]),
        ("tools", &[json!([])]),
        ("tool_choice", &[json!("none"), json!("auto")]),
        ("response_format", &[json!({ "type": "text" })]),
        ("guided_json", &[]),
        ("guided_regex", &[]),
        ("guided_choice", &[]),
        ("guided_grammar", &[]),
        ("functions", &[json!([])]),
        ("function_call", &[json!("none"), json!("auto")]),
        ("allowed_token_ids", &[]),
        ("bad_words", &[json!([])]),
        ("truncate_prompt_tokens", &[]),
        ("include_stop_str_in_output", &[json!(false)]),
        ("skip_special_tokens", &[json!(true)]),
        ("add_generation_prompt", &[json!(true)]),
        ("continue_final_message", &[json!(false)]),
        ("chat_template", &[]),
        ("chat_template_kwargs", &[json!({})]),
        ("structured_outputs", &[]),
        ("suffix", &[json!("")]),
        ("echo", &[json!(false)]),
    ])
}
