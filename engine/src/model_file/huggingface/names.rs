//! Names of tensors: Hugging Face's into GGUF's. Called for each tensor of a safetensors file.

/// What a tensor is called in GGUF.
pub(super) enum Name {
    /// By this name.
    Known(String),
    /// Not at all: the engine computes it.
    Computed,
    /// We know none.
    Unknown,
}

/// Translates a name. Gemma has norms before and after its layers, the others before them only.
pub(super) fn in_gguf(name: &str, architecture: &str) -> Name {
    let name = name.strip_prefix("language_model.").unwrap_or(name);
    match name {
        "model.embed_tokens.weight" => return Name::Known("token_embd.weight".into()),
        "model.norm.weight" => return Name::Known("output_norm.weight".into()),
        "lm_head.weight" => return Name::Known("output.weight".into()),
        _ => {}
    }
    let Some((layer, part)) = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) else {
        return Name::Unknown;
    };
    if part.ends_with("rotary_emb.inv_freq") {
        return Name::Computed;
    }
    let Some((part, kind)) = part.rsplit_once('.').filter(|(_, kind)| matches!(*kind, "weight" | "bias")) else {
        return Name::Unknown;
    };
    let is_gemma = architecture.starts_with("gemma");
    let known = match part {
        "input_layernorm" => "attn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.qkv_proj" => "attn_qkv",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "post_attention_layernorm" if is_gemma => "post_attention_norm",
        "post_attention_layernorm" => "ffn_norm",
        "pre_feedforward_layernorm" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" | "mlp.gate_up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        _ => return Name::Unknown,
    };
    Name::Known(format!("blk.{layer}.{known}.{kind}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_translated_by_place_and_architecture() {
        let known = |name: &str, architecture: &str| match in_gguf(name, architecture) {
            Name::Known(known) => known,
            Name::Computed => "computed".into(),
            Name::Unknown => "unknown".into(),
        };
        assert_eq!(known("model.layers.11.self_attn.q_proj.bias", "qwen2"), "blk.11.attn_q.bias");
        assert_eq!(known("model.layers.0.post_attention_layernorm.weight", "llama"), "blk.0.ffn_norm.weight");
        assert_eq!(
            known("model.layers.0.post_attention_layernorm.weight", "gemma3"),
            "blk.0.post_attention_norm.weight"
        );
        assert_eq!(known("model.layers.0.self_attn.rotary_emb.inv_freq", "llama"), "computed");
        assert_eq!(known("vision_tower.x.weight", "gemma3"), "unknown");
    }
}
