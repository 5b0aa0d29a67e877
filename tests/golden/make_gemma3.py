"""Writes gemma3.json beside it: what Gemma-3-270M (Q4_K_M, tests/golden/fetch-gemma3) computes, by an independent float32
NumPy forward pass over weights that the `gguf` package unpacked; token ids are SentencePiece's own, from its model rebuilt
of the file's pieces and scores.

The formulas are the Gemma 3 report's: embeddings times the root of the width; norms before and after attention and the
feed-forward layer; queries and keys normalised by head, rotated in halves; five of six layers see the last 512 tokens and
have a rotary base of 10,000, the sixth sees all and has 1,000,000; GELU in its tanh form; a tied embedding.

Run: python3 tests/golden/make_gemma3.py MODEL.gguf, where gguf, numpy, sentencepiece and protobuf are installed.
"""

import json
import pathlib
import sys

import gguf
import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as sp

reader = gguf.GGUFReader(sys.argv[1])
field = lambda key: reader.fields[key].contents()
weights = {}
for tensor in reader.tensors:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    weights[tensor.name] = values.reshape([int(dim) for dim in reversed(tensor.shape)])

LAYERS = field("gemma3.block_count")
WIDTH = field("gemma3.embedding_length")
HEADS = field("gemma3.attention.head_count")
KV_HEADS = field("gemma3.attention.head_count_kv")
HEAD = field("gemma3.attention.key_length")
EPS = np.float32(field("gemma3.attention.layer_norm_rms_epsilon"))
WINDOW = field("gemma3.attention.sliding_window")


def norm(x, weight):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * weight


def rotate(x, positions, theta):
    frequencies = theta ** (-np.arange(HEAD // 2, dtype=np.float64) * 2 / HEAD)
    angles = positions[:, None].astype(np.float64) * frequencies
    cos, sin = np.cos(angles)[:, None].astype(np.float32), np.sin(angles)[:, None].astype(np.float32)
    first, second = x[..., :HEAD // 2], x[..., HEAD // 2:]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class Sequence:
    """Keys and values so far; a step returns the last token's logits."""

    def __init__(self):
        self.cache = [(np.zeros((0, KV_HEADS, HEAD), np.float32),) * 2 for _ in range(LAYERS)]
        self.length = 0

    def step(self, ids):
        positions = np.arange(self.length, self.length + len(ids))
        self.length += len(ids)
        x = weights["token_embd.weight"][ids] * np.float32(np.sqrt(WIDTH))
        for layer in range(LAYERS):
            w = lambda part: weights[f"blk.{layer}.{part}.weight"]
            is_global = (layer + 1) % 6 == 0
            theta = field("gemma3.rope.freq_base") if is_global else 10_000.0
            h = norm(x, w("attn_norm"))
            query = norm((h @ w("attn_q").T).reshape(-1, HEADS, HEAD), w("attn_q_norm"))
            key = norm((h @ w("attn_k").T).reshape(-1, KV_HEADS, HEAD), w("attn_k_norm"))
            value = (h @ w("attn_v").T).reshape(-1, KV_HEADS, HEAD)
            keys = np.concatenate([self.cache[layer][0], rotate(key, positions, theta)])
            values = np.concatenate([self.cache[layer][1], value])
            self.cache[layer] = (keys, values)
            query = rotate(query, positions, theta)
            distance = positions[:, None] - np.arange(self.length)[None]
            seen = (distance >= 0) if is_global else (distance >= 0) & (distance < WINDOW)
            attended = np.empty_like(query)
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                scores = query[:, head] @ keys[:, kv].T / np.sqrt(np.float32(HEAD))
                scores = np.where(seen, scores, -np.inf)
                scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
                attended[:, head] = scores / scores.sum(axis=-1, keepdims=True) @ values[:, kv]
            x = x + norm(attended.reshape(len(ids), -1) @ w("attn_output").T, w("post_attention_norm"))
            h = norm(x, w("ffn_norm"))
            x = x + norm((gelu(h @ w("ffn_gate").T) * (h @ w("ffn_up").T)) @ w("ffn_down").T, w("post_ffw_norm"))
        return norm(x[-1], weights["output_norm.weight"]) @ weights["token_embd.weight"].T


proto = sp.ModelProto()
proto.trainer_spec.model_type = sp.TrainerSpec.BPE
proto.trainer_spec.byte_fallback = True
for name in ("unk", "bos", "eos", "pad"):
    key = {"unk": "unknown", "pad": "padding"}.get(name, name)
    setattr(proto.trainer_spec, f"{name}_id", field(f"tokenizer.ggml.{key}_token_id"))
proto.normalizer_spec.name = "identity"
proto.normalizer_spec.add_dummy_prefix = False
proto.normalizer_spec.remove_extra_whitespaces = False
types = field("tokenizer.ggml.token_type")
for text, score, kind in zip(field("tokenizer.ggml.tokens"), field("tokenizer.ggml.scores"), types):
    # GGUF's converter writes the spaces of user-defined pieces as they are in a text.
    proto.pieces.add(piece=text.replace(" ", "\u2581") if kind == 4 else text, score=score, type=kind)
pieces = sentencepiece.SentencePieceProcessor()
pieces.LoadFromSerializedProto(proto.SerializeToString())
BOS = field("tokenizer.ggml.bos_token_id")

story = "The river rose in the night and by morning the lower fields were under water. "
PROMPTS = {
    "capital": "The capital of France is",
    "count": "1, 2, 3, 4, 5, 6,",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "german": "Die Donau ist der zweitlängste Fluss in Europa und flie\u00dft durch",
    "long_700": story * 41 + "After the flood",
}
TEXTS = [
    "Hello, world!", "  two  spaces ", "\n\n\n", "\ttab", "caf\u00e9 na\u00efve", "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0", "\U0001f600 \U0001f9d1\u200d\U0001f680",
    "a" * 50, "1234567890", "x = [i ** 2 for i in range(10)]", "\u2581", "<b>bold</b>", "\u0000\u0001", "e\u0301", "don't  stop",
    "    indented\n        more",
]
golden = {"cases": {}, "tokenizer": [{"text": text, "ids": [BOS] + pieces.encode(text)} for text in TEXTS]}
for name, prompt in PROMPTS.items():
    ids = [BOS] + pieces.encode(prompt)
    sequence = Sequence()
    logits = sequence.step(ids)
    top = np.argsort(-logits, kind="stable")[:10]
    case = {"prompt": prompt, "ids": ids, "top_ids": top.tolist(), "top_logits": [round(float(logits[i]), 4) for i in top]}
    greedy, margins = [], []
    for _ in range(24):
        best, second = np.argsort(-logits, kind="stable")[:2]
        greedy.append(int(best))
        margins.append(round(float(logits[best] - logits[second]), 4))
        logits = sequence.step([int(best)])
    case |= {"greedy_ids": greedy, "greedy_margin": margins, "greedy_text": pieces.decode(greedy)}
    golden["cases"][name] = case
    print(name, len(ids), repr(case["greedy_text"]), min(margins), flush=True)
pathlib.Path(__file__).with_name("gemma3.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")
