"""Four over six against a plain loop over blocks, on data where the two errors nearly or exactly tie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvfp4_train.precision import QuantSpec, quantize, quantize_values
from tests.precision import oracles
from tests.precision.oracles import Floats

F32 = np.float32


def row_errors(block: Floats, decoded: Floats, measure: str) -> Floats:
    difference = decoded - block
    errors = np.abs(difference) if measure == "mae" else difference * difference
    total = errors[:, 0]
    for column in range(1, errors.shape[1]):
        total = total + errors[:, column]
    return total


def loop(x: Floats, tile: int, measure: str) -> tuple[Floats, Floats]:
    """Stored scales and decoded values, tile by tile."""
    amax = np.abs(x).max()
    s_enc = F32(1536) / amax
    s_dec = F32(1) / s_enc
    scales, values = np.zeros((x.shape[0] // tile, x.shape[1] // 16), F32), np.zeros_like(x)
    for m in range(scales.shape[0]):
        for n in range(scales.shape[1]):
            block = x[tile * m : tile * m + tile, 16 * n : 16 * n + 16]
            base = (np.abs(block).max() / F32(6)) * s_enc
            found = []
            for factor in (F32(1), F32(1.5)):
                scale = F32(oracles.nearest(base * factor, "e4m3"))
                elements = oracles.nearest(block * (F32(1) / (scale * s_dec)), "e2m1")
                rows = row_errors(block, elements * scale * amax / F32(1536), measure)
                while len(rows) > 1:
                    rows = rows[: len(rows) // 2] + rows[len(rows) // 2 :]
                found.append((rows[0], scale, elements))
            _, scale, elements = found[1] if found[1][0] < found[0][0] else found[0]
            scales[m, n] = scale
            values[tile * m : tile * m + tile, 16 * n : 16 * n + 16] = elements * scale * s_dec
    return scales, values


@pytest.mark.parametrize("measure", ["mae", "mse"])
@pytest.mark.parametrize("tile", [1, 16])
def test_equals_a_loop_over_blocks(measure: str, tile: int) -> None:
    generator = torch.Generator().manual_seed(tile)
    # Few bits, so that many blocks are as good with 4 as with 6 and the order of operations decides.
    x = torch.randint(1, 25, (64, 256), generator=generator).float() / 4 * 1.7
    x *= torch.randint(0, 2, x.shape, generator=generator).float() * 2 - 1
    scales, values = loop(x.numpy(), tile, measure)
    spec = QuantSpec("nvfp4", tile=(tile, 16), four_over_six=measure)
    found = quantize(x, spec)
    assert found.scales is not None
    assert torch.equal(found.scales.float(), torch.from_numpy(scales))
    assert torch.equal(found.dequantize(), torch.from_numpy(values))
    by_columns = quantize_values(x.t().contiguous(), spec, axis=0)
    assert torch.equal(by_columns.dequantize().t(), torch.from_numpy(values))
