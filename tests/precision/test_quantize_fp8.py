"""FP8 with block scales and with one scale for the tensor, against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nvfp4_train.precision import QuantSpec, quantize, quantize_values
from nvfp4_train.precision.fp8 import encode_scale
from tests.precision import oracles

F32 = np.float32


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * torch.exp2(torch.randint(-8, 9, (rows, 1), generator=generator))


def encode(amax: F32, largest: float, power_of_two: bool = False) -> F32:
    with np.errstate(over="ignore", divide="ignore"):
        enc = F32(largest) / amax
    if amax == 0 or not np.isfinite(amax):
        enc = F32(1)
    enc = min(enc, oracles.F32_MAX)
    return F32(2.0 ** math.floor(math.log2(enc))) if power_of_two else enc


@pytest.mark.parametrize("tile", [(1, 128), (128, 128)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_block_scales_equal_a_loop(tile: tuple[int, int], power_of_two: bool) -> None:
    x = matrix(256, 384)
    x[:128, :128] = 0
    values, scales = x.numpy().copy(), np.zeros((256 // tile[0], 3), F32)
    for m in range(scales.shape[0]):
        for n in range(3):
            block = values[tile[0] * m : tile[0] * (m + 1), 128 * n : 128 * (n + 1)]
            enc = encode(np.abs(block).max(), 448.0, power_of_two)
            scales[m, n] = F32(1) / enc
            block[:] = oracles.nearest(block * enc, "e4m3") * scales[m, n]
    spec = QuantSpec("fp8_block", tile=tile, power_of_two=power_of_two)
    found = quantize(x, spec)
    assert found.codes.dtype == torch.float8_e4m3fn
    assert found.scales is not None
    assert found.scales.dtype == torch.float32
    assert torch.equal(found.scales, torch.from_numpy(scales))
    assert torch.equal(found.dequantize(), torch.from_numpy(values))
    assert torch.equal(quantize_values(x.t().contiguous(), spec, axis=0).values.t(), torch.from_numpy(values))


@pytest.mark.parametrize(("element", "largest"), [(None, 448.0), ("e4m3", 448.0), ("e5m2", 57344.0)])
def test_current_scaling_follows_this_tensor(element: str | None, largest: float) -> None:
    x = matrix(48, 40)
    enc = encode(x.abs().max().numpy(), largest)
    elements = oracles.nearest(x.numpy() * enc, element or "e4m3")
    spec = QuantSpec("fp8_current", element=element)
    found = quantize(x, spec)
    assert torch.equal(found.codes.float(), torch.from_numpy(elements))
    assert torch.equal(found.dequantize(), torch.from_numpy(elements * (F32(1) / enc)))
    assert found.amax == x.abs().max()
    for axis, source in ((1, x), (0, x.t())):
        values = quantize_values(source, spec, axis=axis)
        assert values.scale is not None
        assert values.scale == torch.from_numpy(np.asarray(F32(1) / enc))


def test_delayed_scaling_follows_what_it_is_given() -> None:
    x = matrix(32, 64)
    spec = QuantSpec("fp8_delayed")
    enc = encode(F32(3.0), 448.0)
    expected = oracles.nearest(x.numpy() * enc, "e4m3") * (F32(1) / enc)
    found = quantize(x, spec, amax=torch.tensor(3.0))
    assert torch.equal(found.dequantize(), torch.from_numpy(expected))
    assert found.dequantize().abs().max() == pytest.approx(3.0)  # saturates, larger values are clamped
    assert found.amax == x.abs().max()  # what the history must learn
    values = quantize_values(x, spec, amax=torch.tensor(3.0))
    assert values.amax == x.abs().max()


def test_delayed_scaling_has_scale_one_before_the_first_amax() -> None:
    x = matrix(32, 64)
    expected = torch.from_numpy(oracles.nearest(x.numpy(), "e4m3"))
    for amax in (None, torch.tensor(0.0)):
        found = quantize(x, QuantSpec("fp8_delayed"), amax=amax)
        assert torch.equal(found.dequantize(), expected)
        assert found.tensor_scale == 1.0


def test_encode_scales_at_the_edges() -> None:
    largest = torch.finfo(torch.float32).max
    amax = torch.tensor([0.0, 1e-38, 1e-44, math.inf, math.nan, 448.0, 300.0])
    assert encode_scale(amax, "e4m3").tolist()[:6] == [1.0, largest, largest, 1.0, 1.0, 1.0]
    assert encode_scale(amax, "e4m3", power_of_two=True).tolist() == [1.0, 2.0**127, 2.0**127, 1.0, 1.0, 1.0, 1.0]
    assert encode_scale(torch.tensor([100.0]), "e4m3", power_of_two=True).item() == 4.0


def test_the_largest_finite_number_is_no_overflow_of_the_check() -> None:
    x = torch.full((2, 16), 3e38)
    decoded = quantize(x, QuantSpec("fp8_current")).dequantize()
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, x, rtol=1e-6, atol=0)


def test_a_bad_value_takes_its_block_alone() -> None:
    x = matrix(4, 384)
    x[1, 130] = math.nan
    bad = quantize(x, QuantSpec("fp8_block")).dequantize().isnan()
    assert bad[1, 128:256].all()
    assert bad.sum() == 128


def test_bf16_is_the_number_itself() -> None:
    x = matrix(8, 24)
    found = quantize(x, QuantSpec("bf16"))
    assert found.codes.dtype == torch.bfloat16
    assert torch.equal(found.dequantize(), x.bfloat16().float())
    values = quantize_values(x, QuantSpec("bf16"), axis=0)
    assert torch.equal(values.values, x.bfloat16().float())
    assert values.scale is None
