"""Quartet II's corrected block scales against a plain loop, and unbiased over fresh rotations."""

from __future__ import annotations

import math

import numpy as np
import torch

from nvfp4_train.precision import QuantSpec, quantize, quantize_values
from nvfp4_train.precision.eden import V
from nvfp4_train.precision.rotation import rotate
from tests.precision import oracles
from tests.precision.oracles import Floats

F32 = np.float32
SPEC = QuantSpec("nvfp4", rotation=128, signs="fresh", correction="eden")


def in_order(values: Floats) -> F32:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def by_halves(values: list[F32]) -> F32:
    while len(values) > 1:
        half = len(values) // 2
        values = [values[i] + values[i + half] for i in range(half)]
    return values[0]


def loop(rotated: Floats, key: int) -> tuple[Floats, Floats]:
    """Stored block scales and decoded values of a rotated matrix."""
    rows, columns = rotated.shape
    random = oracles.random_bytes(key, rows, columns // 16)
    s_dec = np.abs(rotated).max() / F32(255.99 * V)
    scales, decoded = np.zeros((rows, columns // 16), F32), np.zeros_like(rotated)
    magnitudes = oracles.grid("e4m3")
    for m in range(rows):
        for group in range(columns // 128):
            blocks, q, squares, products = [], [], [], []
            for b in range(8):
                x = rotated[m, 128 * group + 16 * b : 128 * group + 16 * b + 16]
                s = oracles.nearest(np.abs(x).max() / F32(V) / s_dec, "e4m3")
                s = F32(1) if s == 0 else F32(s)
                y = x / (s * s_dec)
                blocks.append(s)
                q.append(oracles.nearest(y, "e2m1"))
                squares.append(in_order(y * y))
                products.append(in_order(y * q[-1]))
            divisor = by_halves(products)
            c = F32(1) if divisor == 0 else by_halves(squares) / divisor
            for b in range(8):
                at = 8 * group + b
                scales[m, at] = oracles.stochastic(float(blocks[b] * c), int(random[m, at]), magnitudes)
                decoded[m, 16 * at : 16 * at + 16] = q[b] * scales[m, at] * s_dec
    return scales, decoded


def test_v_is_the_published_constant() -> None:
    assert math.isclose(V, 6.0721, rel_tol=1e-4)


def test_equals_a_loop_over_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 256, generator=generator) * torch.logspace(-4, 2, 6)[:, None]
    x[3, 128:] = 0
    x[5, 7] = 40.0
    for dtype in (torch.float32, torch.bfloat16):
        source, key = x.to(dtype), 2**33 + 12345
        scales, decoded = loop(rotate(source, SPEC, key).float().numpy(), key)
        found = quantize(source, SPEC, seed=key)
        assert found.scales is not None
        assert torch.equal(found.scales.float(), torch.from_numpy(scales))
        assert torch.equal(found.dequantize(), torch.from_numpy(decoded))
        values = quantize_values(source.t().contiguous(), SPEC, key=key, axis=0)
        assert torch.equal(values.dequantize().t(), torch.from_numpy(decoded))


def test_nearly_unbiased_over_fresh_signs_where_nearest_rounding_shrinks() -> None:
    """The published correction weighs the blocks of a group alike, and so shrinks by .05%: no more, no less."""
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1))
    nearest = QuantSpec("nvfp4", rotation=128, signs="fresh")

    def mean_projection(spec: QuantSpec) -> tuple[float, float]:
        shares = []
        for key in range(20):
            rotated, decoded = rotate(x, spec, key), quantize(x, spec, seed=key).dequantize()
            shares.append(float((rotated * decoded).sum() / x.square().sum()))
        return float(np.mean(shares)) - 1, float(np.std(shares)) / math.sqrt(len(shares))

    bias, deviation = mean_projection(SPEC)
    assert deviation < 7e-5
    assert abs(bias + 5.0e-4) < 3 * deviation
    bias, _ = mean_projection(nearest)
    assert abs(bias + 4.5e-3) < 2e-4
