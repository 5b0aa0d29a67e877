//! `config.json` into GGUF's metadata keys. Called when a directory is opened; what a model's architecture makes of the keys is
//! its own file's (`model/<architecture>.rs`).

use serde_json::Value as Json;

use super::super::{Array, Metadata, Value};

/// Names of numbers: Hugging Face's, and GGUF's behind the architecture's name.
const NUMBERS: [(&str, &str); 18] = [
    ("vocab_size", "vocab_size"),
    ("hidden_size", "embedding_length"),
    ("num_hidden_layers", "block_count"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("head_dim", "attention.key_length"),
    ("intermediate_size", "feed_forward_length"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("max_position_embeddings", "context_length"),
    ("rope_theta", "rope.freq_base"),
    ("rope_local_base_freq", "rope.freq_base_swa"),
    ("sliding_window", "attention.sliding_window"),
    ("max_window_layers", "attention.max_window_layers"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("partial_rotary_factor", "rope.partial_factor"),
    ("query_pre_attn_scalar", "attention.query_scalar"),
    ("original_max_position_embeddings", "rope.scaling.original_context_length"),
];

/// Names of a scaling's numbers.
const SCALING: [(&str, &str); 9] = [
    ("factor", "rope.scaling.factor"),
    ("original_max_position_embeddings", "rope.scaling.original_context_length"),
    ("low_freq_factor", "rope.scaling.low_freq_factor"),
    ("high_freq_factor", "rope.scaling.high_freq_factor"),
    ("attention_factor", "rope.scaling.attn_factor"),
    ("beta_fast", "rope.scaling.yarn_beta_fast"),
    ("beta_slow", "rope.scaling.yarn_beta_slow"),
    ("rope_theta", "rope.freq_base"),
    ("partial_rotary_factor", "rope.partial_factor"),
];

/// Puts the configuration's values into `metadata`; returns GGUF's name of the architecture.
///
/// # Errors
/// When the model is of a kind that is not supported.
pub(super) fn translate(config: &Json, metadata: &mut Metadata) -> Result<&'static str, String> {
    let kind = config["model_type"].as_str().ok_or("has no `model_type`")?;
    let architecture = match kind {
        "llama" => "llama",
        "mistral" => "mistral",
        "qwen2" => "qwen2",
        "qwen3" => "qwen3",
        "gemma2" => "gemma2",
        "gemma3_text" => "gemma3",
        "phi3" => "phi3",
        "smollm3" => "smollm3",
        other => {
            let known = "llama, mistral, qwen2, qwen3, gemma2, gemma3_text, phi3, smollm3";
            return Err(format!("`model_type` is `{other}`; supported are {known}"));
        }
    };
    if !config["quantization_config"].is_null() {
        let method = config["quantization_config"]["quant_method"].as_str().unwrap_or("unnamed");
        return Err(format!(
            "the weights are quantised by `{method}`, which is not supported: take the model's GGUF file"
        ));
    }
    check_activation(config, architecture)?;
    metadata.set("general.architecture", Value::String(architecture.into()));
    let mut set = |key: &str, value: Value| metadata.set(&format!("{architecture}.{key}"), value);
    for (from, to) in NUMBERS {
        number(config, from)?.into_iter().for_each(|value| set(to, value));
    }
    let uses_window = config["use_sliding_window"].as_bool().unwrap_or(true);
    if !uses_window {
        set("attention.sliding_window", Value::Unsigned(0));
    }
    if let Some(layers) = config["layer_types"].as_array() {
        let slides = layers.iter().map(|layer| layer == "sliding_attention").collect();
        set("attention.sliding_window_pattern", Value::Array(Array::Bools(slides)));
    } else if let Some(every) = number(config, "sliding_window_pattern")? {
        set("attention.sliding_window_pattern", every);
    }
    if let Some(layers) = config["no_rope_layers"].as_array() {
        let rotated = layers.iter().map(|layer| layer.as_i64() != Some(0)).collect();
        set("rope.layers", Value::Array(Array::Bools(rotated)));
    }
    scaling(&config["rope_scaling"], false, &mut set)?;
    scaling(&config["rope_parameters"], false, &mut set)?;
    Ok(architecture)
}

/// A scaling, or one by kind of layer.
fn scaling(scaling: &Json, is_local: bool, set: &mut impl FnMut(&str, Value)) -> Result<(), String> {
    if let Some(whole) = scaling.get("full_attention") {
        self::scaling(whole, false, set)?;
        return self::scaling(&scaling["sliding_attention"], true, set);
    }
    if is_local {
        number(scaling, "rope_theta")?.into_iter().for_each(|value| set("rope.freq_base_swa", value));
        return Ok(());
    }
    let kind = scaling["rope_type"].as_str().or(scaling["type"].as_str());
    if let Some(kind) = kind.filter(|kind| *kind != "default") {
        set("rope.scaling.type", Value::String(kind.to_owned()));
    }
    for (from, to) in SCALING {
        number(scaling, from)?.into_iter().for_each(|value| set(to, value));
    }
    for (from, to) in [("long_factor", "rope.long_factors"), ("short_factor", "rope.short_factors")] {
        if let Some(factors) = scaling[from].as_array() {
            let factors = factors.iter().map(|factor| factor.as_f64().unwrap_or(f64::NAN)).collect();
            set(to, Value::Array(Array::Floats(factors)));
        }
    }
    Ok(())
}

/// A number of an object; `None` where there is none.
fn number(object: &Json, name: &str) -> Result<Option<Value>, String> {
    match &object[name] {
        Json::Null => Ok(None),
        Json::Number(number) => Ok(Some(match number.as_u64() {
            Some(whole) => Value::Unsigned(whole),
            None => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
        })),
        other => Err(format!("`{name}` is {other}, not a number")),
    }
}

/// The activation is the architecture's: another would be computed wrongly.
fn check_activation(config: &Json, architecture: &str) -> Result<(), String> {
    let named = config["hidden_activation"].as_str().or(config["hidden_act"].as_str());
    let expected: &[&str] = if architecture.starts_with("gemma") { &["gelu_pytorch_tanh"] } else { &["silu", "swish"] };
    match named {
        // Gemma 2's first configurations say `gelu` in one place and mean the tanh form.
        Some("gelu") if architecture.starts_with("gemma") => Ok(()),
        Some(named) if !expected.contains(&named) => {
            Err(format!("the activation is `{named}`; {architecture} models have `{}`", expected[0]))
        }
        _ => Ok(()),
    }
}
