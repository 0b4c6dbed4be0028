"""Activation recompute on and off: the same bits in every recipe, whatever a pipeline has begun in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_train.precision.runtime import PrecisionRuntime

from .linears import RECIPE, module, precision, tensors
from .recipe_files import NAMES

pytestmark = pytest.mark.usefixtures("single_process")

# Three micro-batches: one after the other, as a pipeline's first stage runs them, all forward passes first.
ORDERS = ("f0 b0 f1 b1 f2 b2", "f0 f1 b0 f2 b1 b2", "f0 f1 f2 b0 b1 b2")


class _Block(torch.nn.Module):
    """Two linears, recomputed together or not at all, and one after them that never is."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.first, self.second = module("column", (256, 128)), module("row", (128, 128), seed=1)
        self.last = module("column", (128, 128), seed=2)
        self.recompute = recompute

    def _inner(self, x: Tensor) -> Tensor:
        hidden, _ = self.first(x)
        return self.second(torch.relu(hidden).square())[0]

    def forward(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import checkpoint

        hidden = checkpoint(self._inner, False, x) if self.recompute else self._inner(x)
        return self.last(hidden)[0]


def _train(name: str, recompute: bool, order: str, steps: int = 2) -> tuple[list[Tensor], PrecisionRuntime, Any]:
    """Outputs, input gradients and weight gradients of two steps, the runtime, and the assignments."""
    from models.megatron_cpu import install_cpu_rng, megatron_device
    from nvfp4_train.precision.linear import attach

    install_cpu_rng()
    block = _Block(recompute)
    sizes = {"first": (256, 128), "second": (128, 128), "last": (128, 128)}
    assignments = [precision(name, linear=linear, sizes=size) for linear, size in sizes.items()]
    runtime = PrecisionRuntime(5, amax_history=4)
    attach({linear: getattr(block, linear) for linear in sizes}, assignments, runtime)
    results: list[Tensor] = []
    with megatron_device():
        for step in range(steps):
            runtime.begin_step(step, RECIPE)
            results += _micro_batches(block, runtime, order)
            if runtime.observing:
                runtime.check_observed(assignments, RECIPE)
            runtime.end_step()
            results += [parameter.grad.clone() for parameter in block.parameters()]
            block.zero_grad()
    return results, runtime, assignments


def _micro_batches(block: Callable[[Tensor], Tensor], runtime: PrecisionRuntime, order: str) -> list[Tensor]:
    results: list[Tensor] = []
    live: dict[int, tuple[Tensor, Tensor]] = {}
    for event in order.split():
        microbatch = int(event[1])
        x, _, dy = tensors(64, seed=microbatch)
        if event[0] == "f":
            runtime.begin_microbatch(microbatch)
            inputs = x.view(-1, 1, 256).requires_grad_()
            live[microbatch] = (inputs, block(inputs))
        else:
            inputs, outputs = live.pop(microbatch)
            outputs.backward(dy.view(-1, 1, 128))
            assert inputs.grad is not None
            results += [outputs.detach(), inputs.grad]
    return results


@pytest.mark.parametrize("name", NAMES)
def test_recompute_changes_no_bit(name: str) -> None:
    plain, runtime, _ = _train(name, False, ORDERS[0])
    for order in ORDERS:
        again, recomputed, _ = _train(name, True, order)
        assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True)), order
        histories = recomputed.state_dict()
        assert set(histories) == set(runtime.state_dict())
        assert all(torch.equal(value, histories[key]) for key, value in runtime.state_dict().items())
        assert recomputed.observed() == runtime.observed()


def test_the_current_micro_batch_stands_after_a_recompute() -> None:
    """A forward pass after a recomputed backward pass is of the micro-batch that was begun last."""
    from megatron.core.tensor_parallel import checkpoint

    from models.megatron_cpu import install_cpu_rng, megatron_device
    from nvfp4_train.precision.linear import attach

    install_cpu_rng()
    made, runtime = module(), PrecisionRuntime(5)
    attach({"layer": made}, [precision("nvfp4")], runtime)
    runtime.begin_step(1, RECIPE)
    x, _, dy = tensors(64)
    with megatron_device():
        runtime.begin_microbatch(7)
        y = checkpoint(lambda t: made(t)[0], False, x.view(-1, 1, 256).requires_grad_())
        runtime.begin_microbatch(8)
        y.backward(dy.view(-1, 1, 128))
    assert runtime.call().microbatch == 8
