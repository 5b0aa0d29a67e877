"""Writes storage.json beside it: blocks of every quantised storage type and what the `gguf` package unpacks them to.

Run: python3 tests/golden/make_storage.py, where gguf and numpy are installed.
"""

import json
import pathlib

import gguf
import numpy as np

random = np.random.default_rng(7)
fixture = {}
for name in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "BF16", "F16"]:
    kind = gguf.GGMLQuantizationType[name]
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_blocks = 2 if block_len > 1 else 64
    data = random.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    # Scales that are finite and of a usual size, wherever the type keeps them.
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
              "Q6_K": [208], "IQ4_NL": [0], "BF16": [], "F16": []}[name]
    for at in halves:
        scale = (random.random(num_blocks) * 0.05 + 0.001).astype(np.float16)
        data[:, at:at + 2] = scale.view(np.uint8).reshape(num_blocks, 2)
    if name in ("BF16", "F16"):
        data[:, 1] &= 0xBF  # no infinities
    values = gguf.quants.dequantize(data.reshape(1, -1), kind).ravel()
    fixture[name] = {"bytes": data.tobytes().hex(), "values": [float(np.float32(value)) for value in values]}
path = pathlib.Path(__file__).with_name("storage.json")
path.write_text(json.dumps(fixture))
print(path, path.stat().st_size, "bytes")
