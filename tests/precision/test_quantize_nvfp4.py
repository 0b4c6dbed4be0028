"""NVFP4 against plain loops: two-level scales, row scaling, stochastic rounding, blocks far below the largest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nvfp4_train.precision import QuantSpec, quantize, quantize_values
from nvfp4_train.precision.nvfp4 import tensor_scales
from nvfp4_train.precision.rounding import element_key, random_bytes
from tests.precision import oracles

STOCHASTIC = QuantSpec("nvfp4", rounding="stochastic")


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(
        torch.randint(-4, 5, (rows, columns // 16), generator=generator)
    ).repeat_interleave(16, 1)


@pytest.mark.parametrize("seed", range(3))
def test_equals_a_loop_over_blocks(seed: int) -> None:
    x = matrix(24, 64, seed)
    elements, scales, decoded = oracles.nvfp4_rows(x.numpy())
    found = quantize(x, QuantSpec("nvfp4"))
    assert found.scales is not None
    assert torch.equal(found.scales.float(), torch.from_numpy(scales))
    assert torch.equal(found.dequantize(), torch.from_numpy(decoded))
    by_columns = quantize_values(x.t().contiguous(), QuantSpec("nvfp4"), axis=0)
    assert torch.equal(by_columns.values.t(), torch.from_numpy(elements * scales.repeat(16, 1)))


def test_row_scaling_is_each_row_on_its_own() -> None:
    x = matrix(16, 64) * torch.logspace(-3, 3, 16)[:, None]
    spec = QuantSpec("nvfp4", scaling="row")
    found = quantize(x, spec)
    for row in range(16):
        alone = quantize(x[row : row + 1], QuantSpec("nvfp4"))
        assert torch.equal(found.codes[row : row + 1], alone.codes)
        assert torch.equal(found.dequantize()[row : row + 1], alone.dequantize())
        assert found.amax[row] == alone.amax
    values = quantize_values(x.t().contiguous(), spec, axis=0)
    assert values.scale is not None
    assert values.scale.shape == (16,)
    assert torch.equal(values.values.t() * values.scale[:, None], found.dequantize())


def test_a_bad_row_does_not_spoil_its_neighbours_when_row_scaled() -> None:
    x = matrix(4, 32)
    x[2, 7] = math.nan
    decoded = quantize(x, QuantSpec("nvfp4", scaling="row")).dequantize()
    assert decoded[[0, 1, 3]].isfinite().all()
    assert decoded[2].isnan().all()


def test_a_given_amax_replaces_the_tensors_own() -> None:
    x = matrix(16, 64)
    larger = torch.cat([x, torch.full((1, 64), 300.0)])
    found = quantize(x, QuantSpec("nvfp4"), amax=torch.tensor(300.0))
    assert torch.equal(found.dequantize(), quantize(larger, QuantSpec("nvfp4")).dequantize()[:16])
    assert found.amax == x.abs().max()
    rows = torch.full((16,), 300.0)
    by_row = quantize(x, QuantSpec("nvfp4", scaling="row"), amax=rows).dequantize()
    assert torch.equal(by_row, found.dequantize())


def test_tensor_scales_at_the_edges() -> None:
    s_enc, s_dec = tensor_scales(torch.tensor([0.0, 2688.0, 1e-38, math.inf, math.nan]))
    largest = torch.finfo(torch.float32).max
    assert s_enc.tolist() == [largest, 1.0, largest, 1.0, 1.0]
    assert s_dec[:3].isfinite().all()
    assert s_dec[3:].isnan().all()


def test_a_block_far_below_the_largest_becomes_zeros_and_no_nan() -> None:
    x = torch.full((2, 32), 1e-2)
    x[0, 3] = 1e4
    found = quantize(x, QuantSpec("nvfp4"))
    decoded = found.dequantize()
    assert decoded[0, 3] == pytest.approx(1e4, rel=1e-6)
    assert decoded[0, :16].ne(0).sum() == 1
    assert decoded[0, 16:].eq(0).all()
    assert decoded[1].eq(0).all()
    assert decoded.isfinite().all()
    assert found.scales is not None
    assert found.scales.float()[1].eq(0).all()
    x[0, 3] = 1e3  # 1e-5 of it is within E4M3's reach
    assert quantize(x, QuantSpec("nvfp4")).dequantize()[1].ne(0).all()


def test_a_value_rounded_to_zero_keeps_its_sign_in_the_code_alone() -> None:
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([6.0, -0.1, -0.0, 0.1])
    codes = quantize(x, QuantSpec("nvfp4")).codes[0]
    assert [int(c) for c in (codes[0] & 15, codes[0] >> 4, codes[1] & 15, codes[1] >> 4)] == [7, 8, 0, 0]


def test_accuracy_of_gaussian_data() -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))

    def decibels(spec: QuantSpec) -> float:
        error = quantize(x, spec).dequantize() - x
        return float(10 * torch.log10(x.square().sum() / error.square().sum()))

    nearest = decibels(QuantSpec("nvfp4"))
    assert 20 < nearest < 21.5
    assert decibels(QuantSpec("nvfp4", four_over_six="mse")) > nearest + 0.3
    assert decibels(QuantSpec("nvfp4", tile=(16, 16))) < nearest
    assert decibels(STOCHASTIC) < nearest - 2


# ---- stochastic rounding


def test_stochastic_rounding_takes_the_byte_of_each_element() -> None:
    x, key = matrix(12, 64), 0xABCDEF0123
    expected = torch.empty_like(x)
    random = oracles.random_bytes(key, 12, 64)
    _, scales, _ = oracles.nvfp4_rows(x.numpy())
    s_dec = np.float32(1) / (np.float32(2688) / np.abs(x.numpy()).max())
    enc = np.float32(1) / (scales * s_dec)
    y = x.numpy() * enc.repeat(16, 1)
    magnitudes = oracles.grid("e2m1")
    for m in range(12):
        for n in range(64):
            expected[m, n] = oracles.stochastic(float(y[m, n]), int(random[m, n]), magnitudes)
    expected *= torch.from_numpy(scales.repeat(16, 1))
    assert torch.equal(quantize_values(x, STOCHASTIC, key=key).values, expected)
    assert torch.equal(quantize_values(x.t().contiguous(), STOCHASTIC, key=key, axis=0).values, expected.t())
    assert torch.equal(quantize(x, STOCHASTIC, seed=key).dequantize(), expected * torch.from_numpy(np.asarray(s_dec)))


def test_stochastic_rounding_is_unbiased() -> None:
    # One block, drawn 100,000 times; its largest value is a scale's own, so nothing is clipped.
    block = torch.tensor([6.0, 5.1, 4.3, 3.7, 2.9, 2.2, 1.8, 1.3, 1.1, 0.9, 0.6, 0.3, -0.2, -0.7, -2.6, -4.9])
    x = block.repeat(100_000, 1)
    decoded = quantize_values(x, STOCHASTIC, key=5).dequantize().double()
    mean, deviation = decoded.mean(0), decoded.std(0) / math.sqrt(len(x))
    # A byte resolves a probability to 1/256, so the mean is off by up to half of that times the distance.
    magnitudes = torch.tensor([float(m) for m in oracles.grid("e2m1")])
    above = torch.searchsorted(magnitudes, block.abs()).clamp(1, 7)
    resolution = (magnitudes[above] - magnitudes[above - 1]) / 512
    assert ((mean - block).abs() <= 4 * deviation + resolution + 1e-6).all()
    nearest = quantize_values(x[:1], QuantSpec("nvfp4")).dequantize()[0]
    assert (nearest - block).abs().max() > 0.2


def test_bits_differ_between_linears_micro_batches_steps_and_operands_and_nothing_else() -> None:
    x = matrix(64, 128).bfloat16()
    base = (1234, 5, 0, "decoder.layers.2.mixer.in_proj", "dgrad.gradient")
    others = [
        (1234, 5, 1, *base[3:]),
        (1234, 6, 0, *base[3:]),
        (1235, 5, 0, *base[3:]),
        (1234, 5, 0, "decoder.layers.3.mixer.in_proj", base[4]),
        (1234, 5, 0, base[3], "wgrad.gradient"),
    ]

    def values(arguments: tuple[int, int, int, str, str]) -> torch.Tensor:
        return quantize_values(x, STOCHASTIC, key=element_key(*arguments)).values

    first = values(base)
    assert torch.equal(first, values(base))
    for other in others:
        # Independent draws differ in a third of the elements; copies or shifted copies would not.
        assert 0.2 < (values(other) != first).float().mean() < 0.5
    assert torch.equal(
        quantize(x, STOCHASTIC, seed=element_key(*base)).codes, quantize(x, STOCHASTIC, seed=element_key(*base)).codes
    )


def test_bytes_of_both_layouts_belong_to_the_operands_elements() -> None:
    x = matrix(48, 96)
    rows = quantize_values(x, STOCHASTIC, key=3, axis=1).values
    columns = quantize_values(x, STOCHASTIC, key=3, axis=0).values
    assert not torch.equal(rows, columns)
    assert torch.equal(columns, quantize_values(x.t().contiguous(), STOCHASTIC, key=3, axis=1).values.t())
    assert torch.equal(random_bytes(3, 96, 48, axis=0), random_bytes(3, 96, 48).t())
