"""Writes rope.json beside it: rotary frequencies of each scaling, by the formulas of the papers and reference
implementations, with wavelengths where those have them. Theta 10,000, eight values a head.

Run: python3 tests/golden/make_rope.py, where numpy is installed.
"""

import json
import math
import pathlib

import numpy as np

theta, dim = 10_000.0, 8
exponents = np.arange(0, dim, 2) / dim
base = 1.0 / theta**exponents
out = {"default": base, "linear": base / 4}

# NTK-aware scaling as vLLM fixes it: for texts of factor times what the model was trained on.
factor, trained = 4.0, 64
longest = trained * factor
grown = theta * ((factor * longest / trained) - (factor - 1)) ** (dim / (dim - 2))
out["dynamic"] = 1.0 / grown**exponents

# Llama 3.1: by wavelength.
factor, low, high, trained = 8.0, 1.0, 4.0, 512
frequencies = []
for frequency in base:
    wavelength = 2 * math.pi / frequency
    if wavelength < trained / high:
        frequencies.append(frequency)
    elif wavelength > trained / low:
        frequencies.append(frequency / factor)
    else:
        smooth = (trained / wavelength - low) / (high - low)
        frequencies.append((1 - smooth) * frequency / factor + smooth * frequency)
out["llama3"] = frequencies

# YaRN: interpolation by parts, and its temperature.
factor, trained, fast, slow = 4.0, 512, 32, 1
def dimension(rotations):
    return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))
first, last = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), dim - 1)
ramp = np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
out["yarn"] = (base / factor) * ramp + base * (1 - ramp)

out["longrope_short"] = base / np.array([1.0, 1.5, 2.0, 3.0])
out["longrope_long"] = base / np.array([1.0, 4.0, 8.0, 16.0])
fixture = {name: [float(value) for value in values] for name, values in out.items()}
fixture["yarn_factor"] = 0.1 * math.log(4.0) + 1.0
pathlib.Path(__file__).with_name("rope.json").write_text(json.dumps(fixture, indent=1) + "\n")
