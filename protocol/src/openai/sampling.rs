//! The fields that chat and text completions share: how tokens are chosen, when to stop, whether to stream.

use serde_json::{Value, json};

use super::fields::{FieldError, Fields};

/// Parsed and within range.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingFields {
    /// `None`, here and below: the server's default.
    pub temperature: Option<f32>,
    /// `usize::MAX` is all tokens.
    pub top_k: Option<usize>,
    /// In (0, 1].
    pub top_p: Option<f32>,
    /// In [0, 1].
    pub min_p: Option<f32>,
    /// Above 0; 1 is off.
    pub repetition_penalty: Option<f32>,
    /// In [-2, 2]; 0 is off.
    pub presence_penalty: f32,
    /// In [-2, 2]; 0 is off.
    pub frequency_penalty: f32,
    /// (token, what is added to its logit).
    pub logit_bias: Vec<(u32, f32)>,
    /// Answers to give.
    pub n: usize,
    /// Log probabilities of the prompt's tokens, with this many of the likeliest.
    pub prompt_logprobs: Option<usize>,
    /// `None`: the server draws one.
    pub seed: Option<u64>,
    /// `None`: the endpoint's default.
    pub max_tokens: Option<usize>,
    /// Tokens before which no token ends the answer.
    pub min_tokens: usize,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Whether the text that ended it is part of it.
    pub include_stop: bool,
    /// Tokens that end it.
    pub stop_token_ids: Vec<u32>,
    /// Go on past the model's end tokens.
    pub ignore_eos: bool,
    /// Server-sent events.
    pub stream: bool,
    /// A last chunk with the usage.
    pub include_usage: bool,
    /// Lower runs first.
    pub priority: i32,
    /// Keeps KV blocks apart from those of other salts.
    pub cache_salt: String,
    /// Seconds after which the request fails; `None` is the server's maximum.
    pub timeout_s: Option<f64>,
}

/// More stop texts than this are refused: each is searched for in every piece of text.
const MAX_STOPS: usize = 64;
/// Bytes of one stop text: as much of an answer may be held back.
const MAX_STOP_BYTES: usize = 1024;
/// Each is compared with every token.
const MAX_STOP_TOKEN_IDS: usize = 128;
/// Each is a change of the logits in every step; OpenAI's limit.
const MAX_LOGIT_BIASES: usize = 1024;
/// OpenAI's limit of `n`.
pub(super) const MAX_N: usize = 128;
/// A lower temperature, unless it is 0, is raised to it, as vLLM does: the quotients of f32 logits stay finite.
const LEAST_TEMPERATURE: f64 = 0.01;
/// A lower part is raised to it: what is less than the likeliest token's share is that token anyway.
const LEAST_TOP_P: f64 = 1e-6;
/// A temperature, 0 or more, as it is used.
pub fn usable_temperature(temperature: f64) -> f32 {
    if temperature > 0.0 { temperature.max(LEAST_TEMPERATURE) as f32 } else { 0.0 }
}

/// A top-p above 0 as it is used.
pub fn usable_top_p(top_p: f64) -> f32 {
    top_p.max(LEAST_TOP_P) as f32
}

/// Bytes of a `cache_salt`.
const MAX_SALT_BYTES: usize = 1024;

impl SamplingFields {
    pub(super) fn parse(fields: Fields<'_>) -> Result<Self, FieldError> {
        refuse_unserved(fields)?;
        let max_tokens = match fields.positive("max_completion_tokens")? {
            Some(tokens) => Some(tokens),
            None => fields.positive("max_tokens")?,
        };
        let top_k = match fields.integer("top_k")? {
            None => None,
            Some(-1 | 0) => Some(usize::MAX),
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
            Some(options) => {
                if options.bool("continuous_usage_stats")?.unwrap_or(false) {
                    return Err(FieldError::new("stream_options.continuous_usage_stats", "is not supported"));
                }
                options.bool("include_usage")?.unwrap_or(false)
            }
            None => false,
        };
        let temperature = fields.number("temperature", "0 to 100", |t| (0.0..=100.0).contains(&t))?;
        let top_p = fields.number("top_p", "above 0, at most 1", |p| p > 0.0 && p <= 1.0)?;
        let min_p = fields.number("min_p", "0 to 1", |p| (0.0..=1.0).contains(&p))?;
        let penalty = |name| fields.number(name, "-2 to 2", |penalty| (-2.0..=2.0).contains(&penalty));
        let repetition = fields.number("repetition_penalty", "0.01 to 100", |p| (0.01..=100.0).contains(&p))?;
        let max_tokens_or_more = |min: usize| max_tokens.is_some_and(|max| min > max);
        let min_tokens = fields.integer("min_tokens")?.unwrap_or(0);
        let min_tokens = usize::try_from(min_tokens).ok().filter(|min| !max_tokens_or_more(*min)).ok_or_else(|| {
            let most = max_tokens.map_or_else(|| "max_tokens".to_owned(), |max| format!("max_tokens ({max})"));
            FieldError::new("min_tokens", format!("must be 0 to {most}, got {min_tokens}"))
        })?;
        Ok(Self {
            temperature: temperature.map(usable_temperature),
            top_k,
            top_p: top_p.map(usable_top_p),
            min_p: min_p.map(|p| p as f32),
            repetition_penalty: repetition.map(|p| p as f32),
            presence_penalty: penalty("presence_penalty")?.unwrap_or(0.0) as f32,
            frequency_penalty: penalty("frequency_penalty")?.unwrap_or(0.0) as f32,
            logit_bias: logit_bias(fields)?,
            n: count(fields, "n")?.unwrap_or(1),
            prompt_logprobs: fields.logprobs("prompt_logprobs")?,
            seed: fields.integer("seed")?.map(|seed| seed as u64),
            max_tokens,
            min_tokens,
            stop: stop(fields)?,
            include_stop: fields.bool("include_stop_str_in_output")?.unwrap_or(false),
            stop_token_ids: stop_token_ids(fields)?,
            ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
            stream,
            include_usage,
            priority: priority(fields)?,
            cache_salt: cache_salt(fields)?,
            timeout_s: fields.number("timeout", "above 0, at most 1000000 seconds", |s| s > 0.0 && s <= 1e6)?,
        })
    }
}

/// A number of answers.
pub(super) fn count(fields: Fields<'_>, name: &str) -> Result<Option<usize>, FieldError> {
    match fields.positive(name)? {
        Some(count) if count > MAX_N => Err(FieldError::new(name, format!("must be at most {MAX_N}, got {count}"))),
        count => Ok(count),
    }
}

fn logit_bias(fields: Fields<'_>) -> Result<Vec<(u32, f32)>, FieldError> {
    let Some(entries) = fields.entries("logit_bias")? else { return Ok(Vec::new()) };
    if entries.len() > MAX_LOGIT_BIASES {
        let message = format!("has {} tokens, at most {MAX_LOGIT_BIASES} are allowed", entries.len());
        return Err(FieldError::new("logit_bias", message));
    }
    let bias = |(token, value): (&String, &Value)| {
        let param = format!("logit_bias.{token}");
        let id = token.parse().map_err(|_| FieldError::new(&param, "the key must be a token id"))?;
        match value.as_f64().filter(|bias| (-100.0..=100.0).contains(bias)) {
            Some(bias) => Ok((id, bias as f32)),
            None => Err(FieldError::new(param, format!("must be a number from -100 to 100, got {value}"))),
        }
    };
    entries.iter().map(bias).collect()
}

fn priority(fields: Fields<'_>) -> Result<i32, FieldError> {
    let priority = fields.integer("priority")?.unwrap_or(0);
    i32::try_from(priority).map_err(|_| FieldError::new("priority", format!("must fit 32 bits, got {priority}")))
}

fn cache_salt(fields: Fields<'_>) -> Result<String, FieldError> {
    let salt = fields.str("cache_salt")?.unwrap_or_default();
    if salt.len() > MAX_SALT_BYTES {
        let message = format!("has {} bytes, at most {MAX_SALT_BYTES} are allowed", salt.len());
        return Err(FieldError::new("cache_salt", message));
    }
    Ok(salt.to_owned())
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
        ("skip_special_tokens", &[json!(true)]),
        ("add_generation_prompt", &[json!(true)]),
        ("continue_final_message", &[json!(false)]),
        ("chat_template", &[]),
        ("chat_template_kwargs", &[json!({})]),
        ("structured_outputs", &[]),
        ("use_beam_search", &[json!(false)]),
        ("logits_processors", &[json!([])]),
        ("logprob_token_ids", &[json!([])]),
        ("prompt_embeds", &[]),
        ("return_token_ids", &[json!(false)]),
        ("return_tokens_as_token_ids", &[json!(false)]),
        ("detokenize", &[json!(true)]),
        ("modalities", &[json!(["text"])]),
        ("audio", &[]),
        ("mm_processor_kwargs", &[json!({})]),
    ])
}
