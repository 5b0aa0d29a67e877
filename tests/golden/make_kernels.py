"""Writes kernels.json beside it: what the references of shaders/src/reference must compute, by NumPy in float64.

Inputs come from the same linear congruential generator as tests/references.rs, so that only results are stored.
Run: python3 tests/golden/make_kernels.py
"""

import json
import pathlib

import numpy as np


def random(length, seed):
    state, out = ((seed + 1) * 0x9E3779B97F4A7C15) % 2**64, []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append(np.float32(state >> 40) / np.float32(1 << 23) - np.float32(1))
    return np.array(out, dtype=np.float64)


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


x = random(3 * 8, 1).reshape(3, 8)
w = random(8, 2)
fixture = {"rms_norm": (x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * w).ravel()}

gate, up = random(12, 3), random(12, 4)
fixture["silu_and_mul"] = gate / (1 + np.exp(-gate)) * up
fixture["gelu_and_mul"] = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up

weights, tokens = random(5 * 8, 5).reshape(5, 8), random(2 * 8, 6).reshape(2, 8)
fixture["matmul"] = (tokens @ weights.T).ravel()

values = random(2 * 2 * 4, 7).reshape(2, 2, 2, 2)  # token, head, pair, two neighbours
angles = np.array([[0.5, 0.25], [1.0, 0.5]])  # token, pair
turned = (values[..., 0] + 1j * values[..., 1]) * np.exp(1j * angles)[:, None, :]
fixture["rotary_embedding"] = np.stack([turned.real, turned.imag], axis=-1).ravel()

# Four query heads over two K/V heads of four values, seven tokens, the last three are queries.
query = random(3 * 4 * 4, 8).reshape(3, 4, 4)
key, value = random(7 * 2 * 4, 9).reshape(7, 2, 4), random(7 * 2 * 4, 10).reshape(7, 2, 4)
out = np.zeros((3, 4, 4))
for row in range(3):
    visible = 4 + row + 1
    for head in range(4):
        k, v = key[:visible, head // 2], value[:visible, head // 2]
        out[row, head] = softmax(k @ query[row, head] * 0.5) @ v
fixture["paged_attention"] = out.ravel()

path = pathlib.Path(__file__).with_name("kernels.json")
path.write_text(json.dumps({name: array.tolist() for name, array in fixture.items()}, indent=1) + "\n")
