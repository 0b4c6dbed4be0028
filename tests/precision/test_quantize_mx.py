"""MXFP4 and MXFP8 against the definition, block by block, with exact powers of two."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from nvfp4_train.precision import QuantSpec, quantize, quantize_values
from nvfp4_train.precision.mx import block_exponents
from tests.precision import oracles

ELEMENT = {"mxfp4": "e2m1", "mxfp8": "e4m3"}
EMAX = {"mxfp4": 2, "mxfp8": 8}


def exponent(amax: float, format_name: str, scale_rounding: str) -> int:
    """The exponent of the definition in exact arithmetic."""
    if amax == 0:
        return -127
    if scale_rounding == "ocp":
        e = math.frexp(amax)[1] - 1 - EMAX[format_name]
    else:
        e = math.frexp(amax)[1] - 20
        while Fraction(2) ** e * Fraction(oracles.ELEMENTS[ELEMENT[format_name]][1]) < Fraction(amax):
            e += 1
    return max(-127, min(127, e))


def decoded(x: torch.Tensor, format_name: str, scale_rounding: str, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and decoded values by a loop over tiles of `tile` x 32."""
    values, scales = x.clone(), torch.zeros(x.shape[0] // tile, x.shape[1] // 32, dtype=torch.uint8)
    for m in range(scales.shape[0]):
        for n in range(scales.shape[1]):
            block = x[tile * m : tile * m + tile, 32 * n : 32 * n + 32]
            e = exponent(float(block.abs().max()), format_name, scale_rounding)
            scales[m, n] = e + 127
            elements = oracles.nearest(np.ldexp(block.numpy(), -e), ELEMENT[format_name])
            values[tile * m : tile * m + tile, 32 * n : 32 * n + 32] = torch.from_numpy(np.ldexp(elements, e))
    return scales, values


@pytest.mark.parametrize("format_name", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("scale_rounding", ["up", "ocp"])
@pytest.mark.parametrize("tile", [1, 32])
def test_equals_a_loop_over_blocks(format_name: str, scale_rounding: str, tile: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=generator)
    x *= torch.exp2(torch.randint(-60, 60, (64, 4), generator=generator)).repeat_interleave(32, 1)
    x[:32, :32] = 0
    x[5, 64:96] = 448.0
    x[6, 64:96] = float(np.nextafter(np.float32(448), np.float32(1000)))
    spec = QuantSpec(format_name, tile=(tile, 32), scale_rounding=scale_rounding)
    scales, values = decoded(x, format_name, scale_rounding, tile)
    found = quantize(x, spec)
    assert found.scales is not None
    assert torch.equal(found.scales, scales)
    assert torch.equal(found.dequantize(), values)
    assert torch.equal(quantize_values(x.t().contiguous(), spec, axis=0).values.t(), values)


@pytest.mark.parametrize(("format_name", "largest"), [("mxfp4", 6.0), ("mxfp8", 448.0)])
def test_scales_round_up_so_that_nothing_saturates(format_name: str, largest: float) -> None:
    above = float(np.nextafter(np.float32(largest), np.float32(1e9)))
    amax = torch.tensor([largest, above, largest * 2**-10, 1.0, 0.0])
    element = ELEMENT[format_name]
    assert block_exponents(amax, element, "up")[:3].tolist() == [0, 1, -10]
    assert block_exponents(amax, element, "up")[4] == -127
    assert (largest * torch.exp2(block_exponents(amax, element, "up").float()) >= amax).all()
    # The specification's own rule lets 7.9 saturate at 6 * 2^0 and 511 at 448 * 2^0.
    ocp = block_exponents(torch.tensor([7.9, 511.0]), element, "ocp")
    assert ocp.tolist() == ([0, 6] if format_name == "mxfp4" else [-6, 0])


def test_exponents_stay_in_reach_of_a_byte() -> None:
    amax = torch.tensor([2.0**-149, 1e-38, torch.finfo(torch.float32).max])
    assert block_exponents(amax, "e4m3", "up").tolist() == [-127, -127, 120]
    assert block_exponents(amax, "e2m1", "up").tolist() == [-127, -127, 126]
    tiny = torch.full((1, 32), 2.0**-130)
    assert torch.equal(quantize(tiny, QuantSpec("mxfp8")).dequantize(), tiny)


@pytest.mark.parametrize("format_name", ["mxfp4", "mxfp8"])
def test_a_bad_value_takes_its_block_alone(format_name: str) -> None:
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    x[1, 40] = math.inf
    found = quantize(x, QuantSpec(format_name))
    assert found.scales is not None
    assert found.scales[1, 1] == 255
    bad = found.dequantize().isnan()
    assert bad[1, 32:64].all()
    assert bad.sum() == 32


def test_mxfp4_rounds_stochastically_with_the_bytes_of_its_elements() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    spec = QuantSpec("mxfp4", rounding="stochastic")
    key = 2**40 + 17
    random = oracles.random_bytes(key, 8, 64)
    found = quantize(x, spec, seed=key)
    assert found.scales is not None
    scales = torch.exp2(found.scales.float() - 127).repeat_interleave(32, 1)
    y, magnitudes = (x / scales).tolist(), oracles.grid("e2m1")
    expected = [[oracles.stochastic(y[m][n], int(random[m, n]), magnitudes) for n in range(64)] for m in range(8)]
    assert torch.equal(found.dequantize(), torch.tensor(expected) * scales)
