"""Squared ReLU and the loss for CUDA, one Triton kernel a pass: it reads its input once and writes its result once.

In plain torch both walk over their tensors several times and the loss keeps FP32 copies of the logits; on a GPU those
walks cost more than the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import ProcessGroup

_ELEMENTS = 2048  # a program's share of an elementwise pass
_COLUMNS = 4096  # logits that a program holds at once
_LEAST = -3.0e38  # a running maximum's start: finite, so that a row of -inf alone gives 0 * exp(0), not NaN


@triton.jit
def _squared_relu_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size).to(tl.float32)
    positive = tl.where(x <= 0, 0.0, x)  # so written, NaN stays NaN
    tl.store(y_ptr + at, positive * positive, mask=at < size)


@triton.jit
def _squared_relu_gradient_kernel(x_ptr, dy_ptr, dx_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=at < size).to(tl.float32)
    tl.store(dx_ptr + at, tl.where(x <= 0, 0.0, 2 * x * dy), mask=at < size)


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        _squared_relu_kernel[(triton.cdiv(x.numel(), _ELEMENTS),)](x, y, x.numel(), _ELEMENTS)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), _ELEMENTS),)
        _squared_relu_gradient_kernel[grid](x, dy.contiguous(), dx, x.numel(), _ELEMENTS)
        return dx


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 of any contiguous tensor, rounded once to its dtype: the bits of `torch.relu(x).square()`."""
    return _SquaredReLU.apply(x.contiguous())


@triton.jit
def _row_sums_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    label_ptr,
    top_ptr,
    sum_ptr,
    chosen_ptr,
    first,
    columns: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a row: its maximum, the sum of exp(logit - maximum), and the label's logit (0 where another rank has it)."""
    row = tl.program_id(0).to(tl.int64)
    top, total = tl.full((), LEAST, tl.float32), tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * columns + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(logits))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(logits - higher))
        top = higher
    label = tl.load(label_ptr + row) - first
    here = (label >= 0) & (label < columns)
    chosen = tl.load(logits_ptr + row * columns + label, mask=here, other=0.0).to(tl.float32)
    tl.store(top_ptr + row, top)
    tl.store(sum_ptr + row, total)
    tl.store(chosen_ptr + row, chosen)


@triton.jit
def _logits_gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, label_ptr, normalizer_ptr, dloss_ptr, dlogits_ptr, first, columns: tl.constexpr, BLOCK: tl.constexpr
):
    """(softmax - [column is the label]) * dloss."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * columns + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    share = tl.exp(logits - tl.load(normalizer_ptr + row))
    label = (tl.load(label_ptr + row) - first).to(tl.int32)  # or each column would be compared with 64 bits
    share -= tl.where(at == label, 1.0, 0.0)
    tl.store(dlogits_ptr + row * columns + at, share * tl.load(dloss_ptr + row), mask=at < columns)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
        rows, columns = labels.numel(), logits.shape[-1]
        ctx.first = group.rank() * columns
        top, total, chosen = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
        _row_sums_kernel[(rows,)](logits, labels, top, total, chosen, ctx.first, columns, _LEAST, _COLUMNS)
        if group.size() > 1:
            highest = top.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            sums = torch.stack((total * (top - highest).exp(), chosen))
            dist.all_reduce(sums, group=group)
            top, (total, chosen) = highest, sums
        normalizer = top + total.log()
        ctx.save_for_backward(logits, labels, normalizer)
        return (normalizer - chosen).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, labels, normalizer = ctx.saved_tensors
        columns, dlogits = logits.shape[-1], torch.empty_like(logits)
        grid = (labels.numel(), triton.cdiv(columns, _COLUMNS))
        _logits_gradient_kernel[grid](
            logits, labels, normalizer, dloss.contiguous(), dlogits, ctx.first, columns, _COLUMNS
        )
        return dlogits, None, None


def cross_entropy(logits: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
    """Cross entropy of logits whose vocabulary is split over tensor-parallel ranks; FP32 inside.

    Args:
        logits: [..., vocabulary / ranks], this rank's part, in rank order.
        labels: [...] token ids of the whole vocabulary.
        group: the tensor-parallel ranks.

    Returns:
        [...] FP32, nats; the same on every rank of the group.
    """
    return _CrossEntropy.apply(logits.contiguous(), labels.contiguous(), group)
