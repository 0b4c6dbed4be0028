"""Quantization health: each statistic against its definition, and sampled only where it was asked for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.health import STATISTICS, statistics
from nvfp4_train.precision.quantizer import quantize, quantize_values
from nvfp4_train.precision.rotation import rotate

from .linears import RECIPE, precision, run, standalone, tensors

SPECS = [
    QuantSpec("nvfp4"),
    QuantSpec("nvfp4", tile=(16, 16)),
    QuantSpec("nvfp4", rotation=16),
    QuantSpec("nvfp4", scaling="row"),
    QuantSpec("nvfp4", rotation=128, signs="fresh", correction="eden"),
    QuantSpec("mxfp4"),
    QuantSpec("mxfp8"),
    QuantSpec("fp8_block", tile=(128, 128)),
    QuantSpec("fp8_current"),
]


def _measure(x: Tensor, spec: QuantSpec, axis: int = 1) -> dict[str, float]:
    values = quantize_values(x, spec, axis=axis, key=3, sign_key=4)
    return dict(zip(STATISTICS, statistics(x, spec, values, axis, sign_key=4).tolist(), strict=True))


def test_bias_sees_what_shrinks_under_both_signs() -> None:
    """A block of one 6 and fifteen .2 of either sign, which nearest rounding flushes: 3 of 9 are gone, not none."""
    x = torch.full((64, 256), 0.2)
    x[:, ::16] = 6.0
    x *= torch.tensor([1.0, -1.0]).repeat(8)[torch.randperm(16, generator=torch.Generator().manual_seed(0))].repeat(16)
    assert abs(float(x[:, x[0].abs() < 1].mean())) < 0.02
    found = _measure(x, QuantSpec("nvfp4"))
    assert found["flushed"] == pytest.approx(15 / 16)
    assert found["bias"] == pytest.approx(-1 / 3, abs=1e-6)
    found = _measure(x, QuantSpec("nvfp4", rounding="stochastic"))
    assert found["flushed"] == pytest.approx(0.6 * 15 / 16, abs=0.01)
    assert abs(found["bias"]) < 0.01


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_statistics_follow_their_definitions(spec: QuantSpec, axis: int) -> None:
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)) ** 3
    x[x.abs() < 1e-3] = 0
    operand = (x if axis == 1 else x.t()).contiguous()
    values = quantize_values(operand, spec, key=3, sign_key=4)
    exact, rounded = rotate(operand, spec, 4).double(), values.dequantize().double()
    found = _measure(x, spec, axis)

    nonzero = exact != 0
    assert found["flushed"] == pytest.approx(float((nonzero & (rounded == 0)).sum() / nonzero.sum()))
    noise = rounded - exact
    assert found["sqnr_db"] == pytest.approx(10 * math.log10(exact.square().sum() / noise.square().sum()), abs=1e-3)
    assert found["bias"] == pytest.approx(float((noise * exact.sign()).mean() / exact.abs().mean()), abs=1e-5)
    assert found["amax"] == pytest.approx(float(exact.abs().max()))
    if values.block_scale is None:
        assert found["scale_spread"] == 0
    else:
        scales = quantize(operand, spec, seed=4 if spec.correction is None else 3).scales
        assert scales is not None
        if spec.correction is None:
            wide = 2.0 ** (scales.double() - 127) if scales.dtype == torch.uint8 else scales.double()
            wide = wide[wide > 2.0**-100]  # a block of zeros has the smallest scale of all
            assert found["scale_spread"] == pytest.approx(float((wide.max() / wide.min()).log2()), abs=1e-4)


def test_saturated_values() -> None:
    # One block whose scale 1/6 * 6.3 rounds down to 1: with a tensor scale of 1 all beyond 6 is out of reach.
    x = torch.full((1, 32), 1.0)
    x[0, :3] = torch.tensor([6.3, -6.2, 6.0])
    x[0, 16] = 2688.0
    for size in (1.0, 1024.0, 2.0**-9):
        assert _measure(x * size, QuantSpec("nvfp4"))["saturated"] == pytest.approx(2 / 32)
    assert _measure(torch.randn(64, 64), QuantSpec("mxfp8"))["saturated"] == 0  # its scales are rounded up


def test_saturated_values_of_delayed_scaling() -> None:
    x = torch.tensor([[500.0, -449.0, 448.0, 1.0]])
    spec = QuantSpec("fp8_delayed")
    for size in (1.0, 1024.0):
        values = quantize_values(x * size, spec, amax=torch.tensor(448.0 * size))
        assert float(statistics(x * size, spec, values, 1)[STATISTICS.index("saturated")]) == 0.5


def test_flushed_block_beside_an_outlier() -> None:
    x = torch.full((1, 32), 1e-2)
    x[0, 0] = 1e4
    x[0, 20] = 0
    found = _measure(x, QuantSpec("nvfp4"))
    assert found["flushed"] == pytest.approx(15 / 31 + 15 / 31)  # the zero itself was not flushed
    assert math.isfinite(found["sqnr_db"])


def test_a_flushed_block_is_not_saturated() -> None:
    """Its scale is 0, and its values are beyond 0, but they were not cut to the largest of anything."""
    x = torch.full((1, 32), 1e-2)
    x[0, 0] = 1e4
    for axis in (0, 1):
        assert _measure(x if axis else x.t(), QuantSpec("nvfp4"), axis)["saturated"] == 0


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec("nvfp4"),
        QuantSpec("nvfp4", tile=(16, 16)),
        QuantSpec("mxfp4"),
        QuantSpec("mxfp8"),
        QuantSpec("mxfp8", tile=(32, 32)),
        QuantSpec("mxfp8", scale_rounding="ocp"),
        QuantSpec("fp8_block"),
        QuantSpec("fp8_block", tile=(128, 128)),
    ],
    ids=str,
)
def test_blocks_of_zeros_have_no_part_in_the_spread_of_scales(spec: QuantSpec, axis: int) -> None:
    """A gradient has whole blocks of zeros where tokens are masked; the scale of one says nothing."""
    x = torch.zeros(300, 300)
    x[:128, :128] = 2.0**-3
    x[128:256, 128:256] = 2.0**4  # 2^7 times as large
    assert _measure(x, spec, axis)["scale_spread"] == 7
    assert _measure(torch.zeros(300, 300), spec, axis)["scale_spread"] == 0


def test_gaussians_have_twenty_decibels() -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(1))
    assert 19.5 < _measure(x, QuantSpec("nvfp4"))["sqnr_db"] < 21.5
    assert _measure(torch.zeros(16, 16), QuantSpec("nvfp4"))["sqnr_db"] == 200


def test_sampled_on_the_first_micro_batch_alone() -> None:
    gemms = standalone(precision("nvfp4"))
    runtime = gemms.runtime
    run(gemms, *tensors())
    assert runtime.health.metrics() == {}

    runtime.sample_health = True
    runtime.begin_step(2, RECIPE)
    runtime.begin_microbatch(4)
    x, w, dy = tensors()
    plain = run(gemms, x, w, dy)
    runtime.begin_microbatch(5)
    run(gemms, x * 100, w, dy * 100)
    found = runtime.health.metrics()
    assert found["quant/layer/fprop_input/amax"] == float(x.float().abs().max())
    assert found["quant/layer/dgrad_gradient/amax"] == float(dy.float().abs().max())
    assert found["quant/layer/fprop_weight/amax"] == float(w.abs().max())
    assert {name.split("/")[2] for name in found if name.count("/") == 3} == {
        "fprop_input", "fprop_weight", "dgrad_gradient", "wgrad_gradient", "wgrad_input", "weight_gradient",
    }  # fmt: skip
    assert found["quant/layer/weight_gradient/zeros"] < 1e-3  # sums of few-bit products do cancel at times
    assert runtime.health.metrics() == {}

    runtime.sample_health = False
    runtime.begin_step(2, RECIPE)
    runtime.begin_microbatch(4)
    assert all(torch.equal(a, b) for a, b in zip(plain, run(gemms, x, w, dy), strict=True))


def test_worst_and_mean() -> None:
    gemms = standalone(precision("nvfp4"))
    gemms.runtime.sample_health = True
    x, w, dy = tensors()
    x[:, :16] = 0
    run(gemms, x, w, dy)
    found = gemms.runtime.health.metrics()

    def column(statistic: str, gemm: str = "") -> list[float]:
        return [v for k, v in found.items() if k.endswith(f"/{statistic}") and k.split("/")[-2].startswith(gemm)]

    assert found["quant/worst_flushed"] == max(column("flushed"))
    assert found["quant/worst_sqnr_db"] == min(column("sqnr_db"))
    assert abs(found["quant/worst_bias"]) == max(abs(v) for v in column("bias"))
    assert found["quant/forward_sqnr_db"] == pytest.approx(sum(column("sqnr_db", "fprop")) / 2)
    backward = column("sqnr_db", "dgrad") + column("sqnr_db", "wgrad")
    assert found["quant/backward_sqnr_db"] == pytest.approx(sum(backward) / 3)
    assert found["quant/worst_gradient_zeros"] == found["quant/layer/weight_gradient/zeros"]
    assert found["quant/worst_gradient_zeros"] == pytest.approx(16 / 256, abs=1e-3)


def test_fused_gradients_are_sampled_too() -> None:
    gemms = standalone(precision("fp8_current"))
    gemms.runtime.sample_health = True
    gemms.runtime.begin_step(2, RECIPE)
    gemms.runtime.begin_microbatch(0)
    x, w, dy = tensors()
    x[:, :64] = 0
    call = gemms.runtime.call()
    _, kept = gemms.forward(x, w, None, call)
    _, gradient = gemms.gradients(dy, call, False, True)
    assert gradient is not None
    buffer = torch.ones(128, 256)
    gemms.weight_gradient(gradient, kept, call, buffer)
    assert gemms.runtime.health.metrics()["quant/layer/weight_gradient/zeros"] == pytest.approx(0.25, abs=1e-3)
    assert torch.equal(buffer[:, :64], torch.ones(128, 64))
    assert not torch.equal(buffer[:, 64:], torch.ones(128, 192))
