"""Quantized weights: once a step, and never another than what the weight would give now."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvfp4_train.precision import operands
from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.quantizer import quantize_values
from nvfp4_train.precision.three_gemms import ThreeGemms

from .linears import RECIPE, precision, run, standalone, tensors

RECIPES = ["nvfp4", "mxfp8", "fp8_block", "quartet2", "nvfp4_fwd_bf16_bwd", "bf16"]


class _Counter:
    """Counts how often a weight [out, in] is quantized."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
        self.count = 0

        def counting(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.count += x.shape == shape
            return quantize_values(x, *args, **kwargs)

        monkeypatch.setattr(operands, "quantize_values", counting)


def _assert_fresh(gemms: ThreeGemms, weight: torch.Tensor) -> None:
    """What the cache gives is what a new linear would make of the weight as it is now."""
    new = standalone(precision("nvfp4"))
    found = gemms._weight(weight, "fprop", 1, gemms.runtime.call())
    exact = new._weight(weight.detach().clone(), "fprop", 1, new.runtime.call())
    assert torch.equal(found.values, exact.values)
    assert torch.equal(found.scale, exact.scale)


def test_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    gemms = standalone(precision("nvfp4"))
    x, w, dy = tensors(64)
    counter = _Counter(monkeypatch, (128, 256))
    for step in range(1, 3):
        gemms.runtime.begin_step(step, RECIPE)
        for microbatch in range(2):
            gemms.runtime.begin_microbatch(microbatch)
            run(gemms, x, w, dy)
        gemms.runtime.end_step()
        assert counter.count == step


def test_backward_weights_with_fresh_signs_are_made_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    gemms = standalone(precision("quartet2"))
    x, w, dy = tensors(64)
    counter = _Counter(monkeypatch, (128, 256))
    for microbatch in range(3):
        gemms.runtime.begin_microbatch(microbatch)
        run(gemms, x, w, dy)
    assert counter.count == 1 + 3


def test_always_the_weight_as_it_is() -> None:
    gemms = standalone(precision("nvfp4"))
    runtime = gemms.runtime
    x, _, dy = tensors()
    layer = torch.nn.Linear(256, 128, bias=False)
    layer.weight.data.copy_(tensors()[1])
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    saved = {name: value.clone() for name, value in layer.state_dict().items()}
    for step in range(1, 3):
        runtime.begin_step(step, RECIPE)
        for microbatch in range(2):
            runtime.begin_microbatch(microbatch)
            layer.weight.grad = run(gemms, x, layer.weight, dy)[2]
            _assert_fresh(gemms, layer.weight)
        optimizer.step()  # in place: the version counter sees it, announced or not
        _assert_fresh(gemms, layer.weight)
        with runtime.evaluating():
            gemms.forward(x, layer.weight, None, runtime.call())
        _assert_fresh(gemms, layer.weight)
    layer.load_state_dict(saved)
    _assert_fresh(gemms, layer.weight)
    with torch.no_grad():
        layer.weight[0, 0] = 50.0
    _assert_fresh(gemms, layer.weight)
    layer.weight.data = layer.weight.data * 2  # another buffer
    _assert_fresh(gemms, layer.weight)
    layer.weight.data.mul_(2)  # seen by nobody
    runtime.weights_changed()
    _assert_fresh(gemms, layer.weight)
    layer.weight.data.mul_(2)
    runtime.begin_step(3, RECIPE)
    runtime.begin_microbatch(0)
    _assert_fresh(gemms, layer.weight)
    layer.weight.data.mul_(2)
    with runtime.evaluating():
        _assert_fresh(gemms, layer.weight)


@pytest.mark.parametrize("name", RECIPES)
def test_equal_without_the_cache(name: str) -> None:
    results = []
    for cached in (True, False):
        gemms = standalone(precision(name), cache_weights=cached)
        x, w, dy = tensors()
        weight = w.clone()
        for step, passes in enumerate((RECIPE, Passes("bf16", "recipe"), RECIPE), start=1):
            gemms.runtime.begin_step(step, passes)
            for microbatch in range(2):
                gemms.runtime.begin_microbatch(microbatch)
                results.append((cached, *run(gemms, x, weight, dy)))
            gemms.runtime.end_step()
            weight -= results[-1][3]
            gemms.runtime.weights_changed()
        assert (len(gemms._weights) > 0) is cached
    half = len(results) // 2
    for (_, *with_cache), (_, *without) in zip(results[:half], results[half:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(with_cache, without, strict=True))
