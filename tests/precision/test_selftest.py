"""The start-up test: passes where the arithmetic is right, names the GEMM where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_train.precision import operands, selftest, three_gemms
from nvfp4_train.precision.assignment import assign
from nvfp4_train.precision.config import PrecisionError
from nvfp4_train.precision.gemm import gemm
from nvfp4_train.precision.quantizer import Values, quantize_values
from nvfp4_train.precision.selftest import self_test

from .linears import precision
from .recipe_files import NAMES, recipe, shapes


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_passes(name: str) -> None:
    assert self_test(assign(recipe(name), shapes("M-*-M-*-")), "cpu") == (
        1 if name == "bf16" else 3 if name == "nemotron3_super" else 2
    )


@pytest.mark.parametrize("which", ["fprop", "dgrad", "wgrad"])
def test_a_kernel_that_returns_zeros(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    calls: list[int] = []

    def broken(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        product = gemm(*args, **kwargs)
        return torch.zeros_like(product) if len(calls) == 1 + ["fprop", "dgrad", "wgrad"].index(which) else product

    monkeypatch.setattr(three_gemms, "gemm", broken)
    with pytest.raises(PrecisionError, match=rf"failed on CPU: {which} in nvfp4 \(as in layer\) is off by 1 "):
        self_test([precision("nvfp4")], "cpu")


def test_stochastic_rounding_that_returns_zeros_or_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in (0.0, float("nan")):

        def broken(x: Tensor, spec: Any, bad: float = bad, **kwargs: Any) -> Values:
            found = quantize_values(x, spec, **kwargs)
            if spec.rounding == "stochastic":
                found.values.fill_(bad)
            return found

        monkeypatch.setattr(operands, "quantize_values", broken)
        with pytest.raises(PrecisionError, match="dgrad in nvfp4"):
            self_test([precision("nvfp4")], "cpu")


def test_rotations_that_do_not_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: Tensor, spec: Any, **kwargs: Any) -> Values:
        kwargs["sign_key"] = kwargs["key"]  # each operand draws signs of its own
        return quantize_values(x, spec, **kwargs)

    monkeypatch.setattr(operands, "quantize_values", broken)
    with pytest.raises(PrecisionError, match="dgrad in nvfp4"):
        self_test([precision("quartet2")], "cpu")


@pytest.mark.parametrize("operand", ["fprop input", "fprop weight", "dgrad gradient", "wgrad gradient", "wgrad input"])
def test_a_kernel_with_one_wrong_number(monkeypatch: pytest.MonkeyPatch, operand: str) -> None:
    calls: list[str] = []
    names = [" ".join(pair) for pair in operands.AXES]

    def broken(x: Tensor, spec: Any, *, block_scales: bool, decode: Tensor | None, **kwargs: Any) -> Values:
        found = quantize_values(x, spec, **kwargs)
        calls.append(names[len(calls)])
        if calls[-1] == operand:
            found.values[-1, -1] += 1
        return found

    monkeypatch.setattr(selftest, "has_kernel", lambda *args: True)
    monkeypatch.setattr(selftest, "quantize_operand", broken)
    with pytest.raises(PrecisionError, match=f"{operand} to nvfp4 differs from the reference in 1 of "):
        selftest._compare_kernels(precision("nvfp4"), torch.device("cpu"), "a card")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_agrees_with_the_reference(name: str) -> None:
    self_test([precision(name)], "cuda")
