"""Writes architectures.json beside it: tiny random models of every architecture, in Hugging Face's terms, and the logits that
their formulas give for one text.

An independent float64 NumPy decoder, written from the models' papers and their reference configurations; weights come from
the generator that the tests have too (tests/support/gguf_writer), so that only seeds are stored.
Run: python3 tests/golden/make_architectures.py, where numpy is installed.
"""

import json
import math
import pathlib

import numpy as np

VOCAB, WIDTH, INNER, HEADS, KV_HEADS = 96, 64, 96, 4, 2
IDS = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(24)]


def random(length, seed):
    state, out = ((seed + 1) * 0x9E3779B97F4A7C15) % 2**64, []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append(np.float32(state >> 40) / np.float32(1 << 23) - np.float32(1))
    return np.array(out, dtype=np.float32)


BASE = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 4,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "hidden_act": "silu", "tie_word_embeddings": False,
}
MODELS = {
    "llama": BASE | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128}},
    "llama-linear": BASE | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": BASE | {"model_type": "mistral", "sliding_window": 8, "head_dim": 32},
    "qwen2": BASE | {"model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 8,
                     "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "qwen3": BASE | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "gemma2": BASE | {"model_type": "gemma2", "head_dim": 32, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 8,
                      "query_pre_attn_scalar": 40, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
                      "tie_word_embeddings": True},
    "gemma3": BASE | {"model_type": "gemma3_text", "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh",
                      "sliding_window": 8, "query_pre_attn_scalar": 32, "rope_theta": 1000000.0,
                      "rope_local_base_freq": 10000.0, "tie_word_embeddings": True, "layer_types": [
                          "sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
    "phi3": BASE | {"model_type": "phi3", "partial_rotary_factor": 0.5, "original_max_position_embeddings": 64,
                    "sliding_window": 600, "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0],
                                                            "long_factor": [1.0, 4.0, 8.0, 16.0]}},
    "smollm3": BASE | {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": True},
}


def tensors(config, head):
    """Names as Hugging Face has them, shapes, how far values reach, and around what."""
    kind, layers = config["model_type"], config["num_hidden_layers"]
    gemma = kind.startswith("gemma")
    query, kv = HEADS * head, KV_HEADS * head
    norm = (0.2, 0.0) if gemma else (0.2, 1.0)
    yield "model.embed_tokens.weight", [VOCAB, WIDTH], 1.0 / 8 if gemma else 1.0, 0.0
    for layer in range(layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", [WIDTH], *norm
        if kind == "phi3":
            yield at + "self_attn.qkv_proj.weight", [query + 2 * kv, WIDTH], 0.4, 0.0
        else:
            for part, rows in [("q", query), ("k", kv), ("v", kv)]:
                yield at + f"self_attn.{part}_proj.weight", [rows, WIDTH], 0.4, 0.0
                if kind == "qwen2" or config.get("attention_bias"):
                    yield at + f"self_attn.{part}_proj.bias", [rows], 0.5, 0.0
        if kind in ("qwen3", "gemma3_text"):
            for part in "qk":
                yield at + f"self_attn.{part}_norm.weight", [head], *norm
        yield at + "self_attn.o_proj.weight", [WIDTH, query], 0.3, 0.0
        if config.get("attention_bias"):
            yield at + "self_attn.o_proj.bias", [WIDTH], 0.3, 0.0
        yield at + "post_attention_layernorm.weight", [WIDTH], *norm
        if gemma:
            yield at + "pre_feedforward_layernorm.weight", [WIDTH], *norm
            yield at + "post_feedforward_layernorm.weight", [WIDTH], *norm
        if kind == "phi3":
            yield at + "mlp.gate_up_proj.weight", [2 * INNER, WIDTH], 0.3, 0.0
        for part, shape in [("gate", [INNER, WIDTH]), ("up", [INNER, WIDTH]), ("down", [WIDTH, INNER])]:
            if kind == "phi3" and part != "down":
                continue
            yield at + f"mlp.{part}_proj.weight", shape, 0.3, 0.0
            if config.get("mlp_bias"):
                yield at + f"mlp.{part}_proj.bias", [shape[0]], 0.3, 0.0
    yield "model.norm.weight", [WIDTH], *norm
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", [VOCAB, WIDTH], 0.5, 0.0


def frequencies(config, dim, theta):
    """Rotary frequencies, and what sines and cosines are multiplied by."""
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "llama3":
        wavelength, trained = 2 * math.pi / plain, scaling["original_max_position_embeddings"]
        low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
        smooth = np.clip((trained / wavelength - low) / (high - low), 0, 1)
        return (1 - smooth) * plain / factor + smooth * plain, 1.0
    if kind == "yarn":
        trained, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        at = lambda turns: dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))
        first, last = max(math.floor(at(32)), 0), min(math.ceil(at(1)), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - first) / max(last - first, 0.001), 0, 1)
        return plain / factor * ramp + plain * (1 - ramp), 0.1 * math.log(factor) + 1
    if kind == "longrope":
        trained = config["original_max_position_embeddings"]
        # The tests allow texts of 512 tokens, so the long factors apply.
        stretch = config["max_position_embeddings"] / trained
        return plain / np.array(scaling["long_factor"]), math.sqrt(1 + math.log(stretch) / math.log(trained))
    return plain, 1.0


def rotate(x, dim, turns, factor):
    angles = np.arange(x.shape[0])[:, None] * turns
    cos, sin = np.cos(angles)[:, None] * factor, np.sin(angles)[:, None] * factor
    first, second, rest = x[..., :dim // 2], x[..., dim // 2:dim], x[..., dim:]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos, rest], axis=-1)


def logits(config, head, w):
    kind = config["model_type"]
    gemma = kind.startswith("gemma")
    get = lambda name: w.get(name, 0.0)

    def norm(x, weight):
        weight = weight + 1 if gemma else weight
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"]) * weight

    def act(x):
        if gemma:
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x / (1 + np.exp(-x))

    cap = lambda x, limit: limit * np.tanh(x / limit) if limit else x
    length = len(IDS)
    x = w["model.embed_tokens.weight"][IDS] * (math.sqrt(WIDTH) if gemma else 1.0)
    dim = int(head * config.get("partial_rotary_factor", 1.0))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        project = lambda part, h: h @ w[f"{at}{part}.weight"].T + get(f"{at}{part}.bias")
        h = norm(x, w[at + "input_layernorm.weight"])
        if kind == "phi3":
            qkv = project("self_attn.qkv_proj", h)
        else:
            qkv = np.concatenate([project(f"self_attn.{part}_proj", h) for part in "qkv"], axis=-1)
        query, key, value = np.split(qkv, [HEADS * head, (HEADS + KV_HEADS) * head], axis=-1)
        query, key, value = (part.reshape(length, -1, head) for part in (query, key, value))
        if at + "self_attn.q_norm.weight" in w:
            query = norm(query, w[at + "self_attn.q_norm.weight"])
            key = norm(key, w[at + "self_attn.k_norm.weight"])
        window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        slides = {"gemma2": layer % 2 == 0, "gemma3_text": config.get("layer_types", [None] * 4)[layer] == "sliding_attention",
                  "mistral": True}.get(kind, False)
        theta = config["rope_theta"]
        turns, factor = frequencies(config, dim, theta)
        if kind == "gemma3_text" and slides:
            turns, factor = config["rope_local_base_freq"] ** (-np.arange(0, dim, 2) / dim), 1.0
        if config.get("no_rope_layers", [1] * 4)[layer]:
            query, key = rotate(query, dim, turns, factor), rotate(key, dim, turns, factor)
        distance = np.arange(length)[:, None] - np.arange(length)[None]
        seen = (distance >= 0) & (distance < window) if slides else distance >= 0
        attended = np.empty_like(query)
        for index in range(HEADS):
            kv = index // (HEADS // KV_HEADS)
            scores = query[:, index] @ key[:, kv].T / math.sqrt(config.get("query_pre_attn_scalar", head))
            scores = np.where(seen, cap(scores, config.get("attn_logit_softcapping")), -np.inf)
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            attended[:, index] = scores / scores.sum(axis=-1, keepdims=True) @ value[:, kv]
        branch = project("self_attn.o_proj", attended.reshape(length, -1))
        x = x + (norm(branch, w[at + "post_attention_layernorm.weight"]) if gemma else branch)
        before = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        h = norm(x, w[f"{at}{before}.weight"])
        if kind == "phi3":
            gate, up = np.split(project("mlp.gate_up_proj", h), 2, axis=-1)
        else:
            gate, up = project("mlp.gate_proj", h), project("mlp.up_proj", h)
        branch = project("mlp.down_proj", act(gate) * up)
        x = x + (norm(branch, w[at + "post_feedforward_layernorm.weight"]) if gemma else branch)
    head_weight = w["model.embed_tokens.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]
    return cap(norm(x[-1], w["model.norm.weight"]) @ head_weight.T, config.get("final_logit_softcapping"))


golden = {"ids": IDS, "models": {}}
for name, config in MODELS.items():
    head = config.get("head_dim", WIDTH // HEADS)
    listed, w = [], {}
    for seed, (tensor, shape, gain, offset) in enumerate(tensors(config, head), start=1000):
        w[tensor] = (np.float32(offset) + random(int(np.prod(shape)), seed) * np.float32(gain)).reshape(shape).astype(np.float64)
        listed.append([tensor, shape, seed, gain, offset])
    values = logits(config, head, w)
    assert np.isfinite(values).all()
    golden["models"][name] = {"config": config, "tensors": listed, "logits": [round(float(value), 6) for value in values]}
    print(name, len(listed), values.std().round(3), np.sort(values)[-3:].round(3))
pathlib.Path(__file__).with_name("architectures.json").write_text(json.dumps(golden) + "\n")
