"""Megatron's linears with our GEMMs: the same numbers through autograd, biases, tied weights, fused gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.runtime import PrecisionRuntime

from .linears import RECIPE, attached, module, precision, run, standalone, tensors

pytestmark = pytest.mark.usefixtures("single_process")


def _through_autograd(made: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Y and dX of [sequence, batch, features] tensors; dW lands in `made.weight.grad`."""
    x = x.view(-1, 2, x.shape[-1]).clone().requires_grad_()
    y, bias = made(x)
    assert bias is None
    y.backward(dy.view(-1, 2, dy.shape[-1]))
    assert x.grad is not None
    return y.detach().flatten(0, 1), x.grad.flatten(0, 1)


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("name", ["bf16", "nvfp4", "quartet2", "fp8_current", "nvfp4_fwd_bf16_bwd"])
def test_autograd_gives_the_three_products(kind: str, name: str) -> None:
    assignment = precision(name)
    x, w, dy = tensors()
    made = module(kind)
    attached(made, assignment)
    y, dx = _through_autograd(made, x, dy)
    for found, exact in zip((y, dx, made.weight.grad), run(standalone(assignment), x, w, dy), strict=True):
        assert found.dtype == exact.dtype
        assert torch.equal(found, exact)


def test_bf16_is_fp32_over_bf16_operands_rounded_once() -> None:
    x, w, dy = tensors()
    made = module()
    attached(made, precision("bf16"))
    y, dx = _through_autograd(made, x, dy)
    w = w.bfloat16().float()
    assert torch.equal(y, (x.float() @ w.t()).bfloat16())
    assert torch.equal(dx, (dy.float() @ w).bfloat16())
    assert torch.equal(made.weight.grad, dy.float().t() @ x.float())


def test_unattached_refuses() -> None:
    made = module()
    assert "unattached" in repr(made)
    with pytest.raises(AssertionError, match="call attach"):
        made(tensors()[0].view(-1, 1, 256))


def test_outside_of_a_micro_batch_refuses() -> None:
    made = module()
    runtime = attached(made, precision("nvfp4"))
    runtime.end_step()
    x = tensors()[0].view(-1, 1, 256)
    with pytest.raises(AssertionError, match="begin_microbatch"):
        made(x)
    with runtime.evaluating():
        made(x)


def test_shows_its_formats() -> None:
    made = module()
    attached(made, precision("nvfp4_fwd_mxfp8_bwd"))
    assert "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8" in repr(made)


@pytest.mark.parametrize("name", ["bf16", "nvfp4"])
def test_bias(name: str) -> None:
    x, _, dy = tensors()
    made = module(bias=True)
    attached(made, precision(name))
    y, _ = _through_autograd(made, x, dy)
    plain = module()
    attached(plain, precision(name))
    without, _ = _through_autograd(plain, x, dy)
    assert (
        float((y.float() - (without.float() + made.bias.detach())).abs().max()) < 0.04
    )  # each was rounded to BF16 once
    torch.testing.assert_close(made.bias.grad, dy.float().sum(0))


def test_weight_of_another_module() -> None:
    """A tied output head has no weight of its own."""
    assignment = precision("nvfp4")
    x, w, dy = tensors()
    head = module(skip_weight_param_allocation=True)
    attached(head, assignment)
    embedding = torch.nn.Parameter(w.clone())
    y, _ = head(x.view(-1, 1, 256), weight=embedding)
    y.backward(dy.view(-1, 1, 128))
    exact = run(standalone(assignment), x, w, dy)
    assert torch.equal(y.flatten(0, 1), exact[0])
    assert torch.equal(embedding.grad, exact[2])


def test_only_what_is_needed_is_computed() -> None:
    x, w, dy = tensors()
    made = module()
    runtime = attached(made, precision("nvfp4"))
    y, _ = made(x.view(-1, 1, 256))
    y.backward(dy.view(-1, 1, 128))
    assert set(runtime.observed()["layer"]["dgrad"]) == {"not needed"}

    made = module()
    runtime = attached(made, precision("nvfp4"))
    made.weight.requires_grad_(False)
    _, dx = _through_autograd(made, x, dy)
    assert set(runtime.observed()["layer"]["wgrad"]) == {"not needed"}
    assert torch.equal(dx, run(standalone(precision("nvfp4")), x, w, dy)[1])


def _with_buffers(fuse: bool, name: str, tied: bool = False) -> tuple[Any, PrecisionRuntime]:
    """Two linears under Megatron's data-parallel wrapper, one of which no micro-batch uses."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from models.megatron_cpu import megatron_device
    from nvfp4_train.precision.linear import attach

    stack = torch.nn.ModuleDict({"used": module(), "unused": module(seed=1)})
    stack["used"].weight.zero_out_wgrad = tied
    runtime = PrecisionRuntime(5, fuse_wgrad=fuse)
    attach(dict(stack.items()), [precision(name, linear=key) for key in stack], runtime)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    with megatron_device():
        return DistributedDataParallel(stack["used"].config, config, stack), runtime


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["bf16", "nvfp4"])
def test_fused_gradients_equal_unfused_ones(name: str, tied: bool) -> None:
    """Three micro-batches, one parameter that nothing uses; tied: the weight is also an embedding."""
    buffers = []
    for fuse in (False, True):
        wrapped, runtime = _with_buffers(fuse, name, tied)
        used, unused = (wrapped.module[key] for key in ("used", "unused"))
        wrapped.zero_grad_buffer()
        runtime.begin_step(1, RECIPE)
        for microbatch in range(3):
            x, _, dy = tensors(64, seed=microbatch)
            runtime.begin_microbatch(microbatch)
            loss = (used(x.view(-1, 1, 256))[0] * dy.view(-1, 1, 128)).sum().float()
            if tied:
                loss = loss + used.weight[3].sum() * 0.25
            loss.backward()
        assert used.weight.grad_added_to_main_grad is fuse
        buffers.append(used.weight.main_grad.clone())
        assert torch.equal(unused.weight.main_grad, torch.zeros(128, 256))
        assert used.weight.grad is None
    assert float(buffers[0].abs().max()) > 0
    torch.testing.assert_close(buffers[0], buffers[1], rtol=1e-6, atol=1e-6)
    if not tied:
        assert torch.equal(buffers[0], buffers[1])


def test_passes_reach_the_linears() -> None:
    x, w, dy = tensors()
    made = module()
    runtime = attached(made, precision("nvfp4"))
    runtime.begin_step(2, Passes("bf16", "bf16"))
    runtime.begin_microbatch(0)
    y, dx = _through_autograd(made, x, dy)
    plain = run(standalone(precision("bf16")), x, w, dy)
    assert torch.equal(y, plain[0])
    assert torch.equal(dx, plain[1])


def test_two_linears_of_one_shape_draw_different_bits() -> None:
    from nvfp4_train.precision.linear import attach

    x, _, dy = tensors()
    stack = {"decoder.layers.0.mlp.linear_fc1": module(), "decoder.layers.1.mlp.linear_fc1": module()}
    runtime = PrecisionRuntime(5)
    attach(stack, [precision("nvfp4", linear=name) for name in stack], runtime)
    runtime.begin_step(1, RECIPE)
    runtime.begin_microbatch(0)
    (_, first), (_, second) = (_through_autograd(made, x, dy) for made in stack.values())
    assert not torch.equal(first, second)


def test_attach_checks_what_it_is_given() -> None:
    from nvfp4_train.precision.linear import attach

    with pytest.raises(AssertionError, match="no precision was assigned to layer"):
        attach({"layer": module()}, [precision("nvfp4", linear="other")], PrecisionRuntime(0))
    with pytest.raises(AssertionError, match="not what was assigned"):
        attach({"layer": module()}, [precision("nvfp4", sizes=(128, 128))], PrecisionRuntime(0))
    with pytest.raises(AssertionError, match="Linear, not a quantized linear"):
        attach({"layer": torch.nn.Linear(2, 2)}, [precision("nvfp4")], PrecisionRuntime(0))
