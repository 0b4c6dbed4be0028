"""Speed and its share of a card's peaks."""

from __future__ import annotations

import pytest

from models.shapes import flops_per_token, linear_shapes
from nvfp4_train.cards import tensor_cores, weighted_peak
from nvfp4_train.compose import compose
from nvfp4_train.precision.assignment import assign
from nvfp4_train.precision.phases import Passes
from nvfp4_train.throughput import Throughput, multiplied_in


def of(recipe: str, device: str, *, emulated: bool = False) -> Throughput:
    config = compose(["experiment=quickstart", f"precision={recipe}"])
    flops = flops_per_token(config.model, config.data.sequence_length)
    return Throughput(4096, flops, 2, device, assign(config.precision, linear_shapes(config.model)), emulated)


def test_formats_and_their_tensor_cores() -> None:
    found = {
        name: tensor_cores(name) for name in ("bf16", "fp8_block", "mxfp8", "nvfp4", "nvfp4 x mxfp8", "bf16 x nvfp4")
    }
    assert list(found.values()) == ["bf16", "fp8", "fp8", "nvfp4", "fp8", "bf16"]


def test_weighted_peak_is_the_rate_of_the_parts_one_after_another() -> None:
    # 1 of BF16 at 989 and 1 of FP8 at 1979: 2 / (1/989 + 1/1979).
    assert weighted_peak("NVIDIA H200", {"bf16": 5.0, "fp8": 5.0}) == pytest.approx(1318.9, abs=0.1)
    assert weighted_peak("NVIDIA GB200", {"nvfp4": 1.0}) == 10000
    assert weighted_peak("cpu", {"bf16": 1.0}) is None


def test_work_is_counted_where_it_multiplies() -> None:
    run = of("fp8_block", "NVIDIA H200")
    quantized = sum(run.flops.linears[linear.name] for linear in run.assignments if linear.format != "bf16")
    assert quantized > 0
    assert dict(multiplied_in(run.flops, run.assignments, Passes())) == {
        "bf16": run.flops.training - 3 * quantized,
        "fp8": 3 * quantized,
    }
    late = multiplied_in(run.flops, run.assignments, Passes(forward="bf16"))
    assert late["fp8"] == 2 * quantized
    assert sum(late.values()) == run.flops.training


def test_both_shares_of_the_peak() -> None:
    native, emulated = (of("fp8_block", "NVIDIA H200", emulated=each) for each in (False, True))
    found = native.metrics(0.5, Passes())
    rate = 4096 / 0.5 * native.flops.training / 2 / 1e12
    assert found["throughput/tflops_per_gpu"] == pytest.approx(rate)
    assert found["throughput/mfu"] == pytest.approx(rate / 989)
    work = multiplied_in(native.flops, native.assignments, Passes())
    peak = sum(work.values()) / (work["bf16"] / 989 + work["fp8"] / 1979)
    assert found["throughput/mfu_weighted"] == pytest.approx(rate / peak)
    assert (
        f"989 TFLOP/s, the dense BF16 peak of NVIDIA H200, and of {peak:,.0f} TFLOP/s" in native.describe(Passes())[0]
    )
    same = emulated.metrics(0.5, Passes())
    assert same["throughput/mfu_weighted"] == same["throughput/mfu"]
    assert set(of("bf16", "cpu").metrics(0.5, Passes())) == {"time/step_s", "throughput/tokens_per_s"}
    assert of("bf16", "cpu").describe(Passes()) == []
