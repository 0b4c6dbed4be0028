"""Fused kernels against plain torch, on a GPU or (as a program) in Triton's interpreter, the loss on two ranks too.

The interpreter must be chosen before Triton is imported, so it needs a process of its own:
TRITON_INTERPRET=1 python -m tests.models.fused_checks
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from models import fused, fused_norm

VOCABULARY, ROWS = 5000, 6  # more than one block of columns, and no multiple of it


def with_gradient(function: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Result, and gradient of x for a gradient `weights` of the result."""
    leaf = x.clone().requires_grad_()
    result = function(leaf)
    (gradient,) = torch.autograd.grad(result, leaf, weights)
    return result.detach(), gradient


def check_squared_relu(device: str, dtype: torch.dtype) -> None:
    """The bits of torch's, over more than one block, with zeros of both signs, inf and NaN."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(3, 1111, generator=generator).to(device, dtype) for _ in range(2))
    x[0, :5] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])
    found, expected = (with_gradient(each, x, dy) for each in (fused.squared_relu, lambda t: F.relu(t).square()))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def loss_inputs(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with large rows and padded columns, labels from both halves of the vocabulary, weights of the losses."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, ROWS // 2, VOCABULARY, generator=generator) * 4
    logits[0, 0] += 80
    logits[..., VOCABULARY // 2 + 10 :] = float("-inf")
    labels = torch.tensor([[0, 17, 2509], [2500, 2499, 100]])
    weights = torch.randn(2, ROWS // 2, generator=generator)
    return logits.to(device, dtype), labels.to(device), weights.to(device)


def check_cross_entropy(device: str, dtype: torch.dtype) -> None:
    """Loss and gradient against FP64; each rank of the group takes its part of the vocabulary."""
    logits, labels, weights = loss_inputs(device, dtype)
    wide = F.cross_entropy
    expected, gradient = with_gradient(
        lambda t: wide(t.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape),
        logits.double(),
        weights.double(),
    )
    group = dist.group.WORLD
    assert group is not None
    part = VOCABULARY // group.size()
    here = slice(group.rank() * part, (group.rank() + 1) * part)
    found, mine = with_gradient(lambda t: fused.cross_entropy(t, labels, group), logits[..., here], weights)
    assert found.dtype == torch.float32
    assert mine.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(mine.double(), gradient[..., here], rtol=rounding, atol=1e-7)


def check_norms(device: str) -> None:
    """Result and gradients against FP64: whole rows and groups, rows in another order in memory, widths and numbers of
    rows that fill no tile, and the gradient that comes past a block.
    """
    generator = torch.Generator().manual_seed(2)
    for shape, group, turned in (((37, 3, 96), 96, False), ((5, 3, 96), 32, True), ((3, 7, 4608), 4608, True)):
        x, dy, skip = (torch.randn(*shape, generator=generator).to(device) for _ in range(3))
        x = x.transpose(0, 1).contiguous().transpose(0, 1) if turned else x
        weight = torch.randn(shape[-1], generator=generator).to(device)
        for whole in {False, group == shape[-1]}:
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
            normalized = F.rms_norm(wide[0].unflatten(-1, (-1, group)), (group,), None, 1e-5).flatten(-2) * wide[1]
            expected = torch.autograd.grad((normalized, wide[0]), wide, (dy.double(), skip.double() * whole))
            if whole:
                y, past = fused_norm.block_norm(*leaves, 1e-5)
                assert torch.equal(past, x)
                found = torch.autograd.grad((y, past), leaves, (dy, skip))
            else:
                y = fused_norm.rms_norm(*leaves, 1e-5, group)
                found = torch.autograd.grad(y, leaves, dy)
            assert y.is_contiguous()
            assert found[0].stride() == x.stride()
            for mine, theirs in zip((y, *found), (normalized, *expected), strict=True):
                torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def check_visible(device: str) -> None:
    """A logit that is not finite makes its row's loss NaN or inf, and no other's."""
    group = dist.group.WORLD
    assert group is not None
    for bad in (float("nan"), float("inf")):
        logits, labels, _ = loss_inputs(device, torch.float32)
        logits[0, 1, 5] = bad
        found = fused.cross_entropy(logits, labels, group)
        assert (~torch.isfinite(found)).nonzero().tolist() == [[0, 1]], bad


def on_rank(rank: int, ranks: int, store: str) -> None:
    """All checks that make sense on this many CPU processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    check_cross_entropy("cpu", torch.float32)
    if ranks == 1:
        check_squared_relu("cpu", torch.float32)
        check_norms("cpu")
        check_visible("cpu")
    dist.destroy_process_group()


def main() -> None:
    """One rank, then two."""
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(on_rank, (ranks, f"{folder}/store"), nprocs=ranks)
    print("equal")


if __name__ == "__main__":
    sys.exit(main())
