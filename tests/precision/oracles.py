"""Independent statements of the quantizers' arithmetic: numpy, ml_dtypes, plain loops; no code under test."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]

F32 = np.float32
F32_MAX = np.finfo(np.float32).max
ELEMENTS = {
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
}
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def nearest(y: Floats, element: str) -> Floats:
    """Nearest-even values of an element type, clamped to its largest."""
    dtype, largest = ELEMENTS[element]
    return np.clip(y, -largest, largest).astype(dtype).astype(np.float32)


def grid(element: str) -> list[Fraction]:
    """All finite magnitudes of an element type, ascending."""
    dtype, largest = ELEMENTS[element]
    values = np.arange(8 if element == "e2m1" else 128, dtype=np.uint8).view(dtype).astype(np.float64)
    return sorted(Fraction(float(v)) for v in values if np.isfinite(v) and v <= largest)


def stochastic(y: float, byte: int, magnitudes: list[Fraction]) -> float:
    """One value rounded by the rule in exact arithmetic: up when (r + 1/2) / 256 >= 1 - p."""
    size = min(abs(Fraction(y)), magnitudes[-1])
    low = max(m for m in magnitudes if m <= size)
    if low == magnitudes[-1]:
        result = low
    else:
        high = min(m for m in magnitudes if m > size)
        p = (size - low) / (high - low)
        result = high if Fraction(2 * byte + 1, 512) >= 1 - p else low
    return float(result) if y >= 0 else -float(result)


def philox(key: tuple[int, int], counter: list[int]) -> list[int]:
    """Philox-4x32-10 of one counter, as its paper writes it."""
    k0, k1 = key
    c = list(counter)
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        high0, low0, high1, low1 = product0 >> 32, product0 % 2**32, product1 >> 32, product1 % 2**32
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def random_bytes(key: int, rows: int, columns: int) -> NDArray[np.uint8]:
    """Random byte of each element, one counter for sixteen elements in row-major order."""
    out = bytearray()
    for counter in range(-(-rows * columns // 16)):
        for word in philox((key % 2**32, key >> 32), [counter % 2**32, counter >> 32, 0, 0]):
            out += word.to_bytes(4, "little")
    return np.frombuffer(bytes(out[: rows * columns]), dtype=np.uint8).reshape(rows, columns)


def hadamard(size: int, signs: list[int]) -> NDArray[np.float64]:
    """diag(signs) H / sqrt(size) in float64."""
    h = np.ones((1, 1))
    while h.shape[0] < size:
        h = np.block([[h, h], [h, -h]])
    return np.diag(np.array(signs, dtype=np.float64)) @ h / np.sqrt(size)


def bf16_exact(x: torch.Tensor) -> bool:
    """Whether every number survives a cast to bfloat16."""
    return torch.equal(x.bfloat16().float(), x.float())


def nvfp4_rows(x: Floats, amax: Floats | None = None) -> tuple[Floats, Floats, Floats]:
    """1x16 nearest NVFP4 of x [M, N], N a multiple of 16: elements, block scales, decoded, by a loop over blocks."""
    amax = np.abs(x).max() if amax is None else amax
    s_enc = min(F32(2688) / amax, F32_MAX)
    s_dec = F32(1) / s_enc
    multiplier = s_enc * (F32(1) / F32(6))
    elements, scales, decoded = np.zeros_like(x), np.zeros((x.shape[0], x.shape[1] // 16), F32), np.zeros_like(x)
    for m in range(x.shape[0]):
        for b in range(x.shape[1] // 16):
            block = x[m, 16 * b : 16 * b + 16]
            scale = nearest(np.minimum(np.abs(block).max() * multiplier, F32(448)), "e4m3")
            with np.errstate(divide="ignore"):
                enc = np.minimum(F32(1) / (scale * s_dec), F32_MAX)
            scales[m, b] = scale
            elements[m, 16 * b : 16 * b + 16] = nearest(block * enc, "e2m1")
            decoded[m, 16 * b : 16 * b + 16] = elements[m, 16 * b : 16 * b + 16] * scale * s_dec
    return elements, scales, decoded
