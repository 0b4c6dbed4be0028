"""Transformer Engine's own linears on a GPU: what a checkpoint must hold so that they go on bit for bit."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.runtime import PrecisionRuntime
from nvfp4_train.precision.te_linear import TeLinear, TeLinears
from nvfp4_train.precision.te_recipes import map_linear
from tests.precision.linears import precision, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not importlib.util.find_spec("transformer_engine"), reason="needs Transformer Engine"),
]
HISTORY = 3


class Run:
    """One linear in delayed scaling, and a runtime of its own."""

    def __init__(self) -> None:
        self.runtime = PrecisionRuntime(5, fuse_wgrad=True)
        self.runtime.expect(["layer"])
        recipe = map_linear(precision("fp8_delayed"), HISTORY)
        assert not isinstance(recipe, str)
        layer = torch.nn.Linear(256, 128, bias=False, device="cuda")
        layer.weight = torch.nn.Parameter(tensors()[1].cuda())
        layer.weight.main_grad = torch.zeros_like(layer.weight)  # type: ignore[attr-defined]
        made = TeLinears({"layer": recipe}, self.runtime).make(precision("fp8_delayed"), layer)
        assert made is not None
        self.linear: TeLinear = made
        self.weight = layer.weight

    def step(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Y, dX and dW of the last of two micro-batches; tensors shrink from step to step."""
        self.runtime.begin_step(number, Passes())
        for index in (0, 1):
            self.runtime.begin_microbatch(index)
            x, _, dy = (t.cuda() / 2**number for t in tensors(seed=10 * number + index))
            leaf = x.requires_grad_()
            y = self.linear(leaf, self.runtime.call())
            y.backward(dy)
        self.runtime.end_step()
        assert leaf.grad is not None
        return y.detach(), leaf.grad, self.weight.main_grad.clone()  # type: ignore[attr-defined]


def test_delayed_scaling_goes_on_bit_for_bit() -> None:
    run, other = Run(), Run()
    for number in range(5):
        run.step(number)
    saved = {name: tensor.cpu() for name, tensor in run.runtime.state_dict().items()}
    assert set(saved) == {"layer.input", "layer.weight", "layer.gradient", "layer.scales"}
    assert all(bool(saved[name].amax() > 0) for name in saved)
    assert other.runtime.load_state_dict(saved) == []
    for number in (5, 6):
        expected, found = run.step(number), other.step(number)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        if number == 5:
            assert not torch.equal(Run().step(number)[1], expected[1])


def test_an_evaluation_leaves_the_histories_as_they_are() -> None:
    run = Run()
    run.step(0)
    before = run.runtime.state_dict()
    with run.runtime.evaluating(), torch.no_grad():
        run.linear(1e3 * tensors()[0].cuda(), run.runtime.call())
    after = run.runtime.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
