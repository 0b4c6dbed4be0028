"""RMS norms for CUDA, one Triton kernel a pass: each reads its inputs once and writes its result once.

The gradient that reaches a block's input past the block, along the residual stream, is added in the same pass. Inputs
may lie in memory in another order than their results, as the scan leaves [b, s, n] where the next linear takes
[s, b, n]. Gradients of weights are summed in an order that depends on the shape alone: the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECES = 5  # of a group, at most, so that they have a power of two of columns each; else one is filled up
# Programs of a backward pass, each of which sums its rows' share of the weight's gradient: all run at once on an H200.
_PARTS = 528


@triton.jit
def _places(row, inner, outer_stride, inner_stride):  # type: ignore[no-untyped-def]
    """Where rows of [outer, inner, n] begin, counted as in contiguous memory."""
    wide = row.to(tl.int64)
    return (wide // inner) * outer_stride + (wide % inner) * inner_stride


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, y_ptr, scale_ptr, rows, inner, outer_stride, inner_stride, eps, width,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x / rms(x) * weight over one group of ROWS rows, and 1 / rms(x)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < GROUP)[None, :]
    own = _places(row, inner, outer_stride, inner_stride)[:, None] + (tl.program_id(1) * GROUP + at)[None, :]
    dense = row.to(tl.int64)[:, None] * width + (tl.program_id(1) * GROUP + at)[None, :]
    squares, pieces = tl.zeros((ROWS, BLOCK), tl.float32), ()
    for i in tl.static_range(PIECES):
        x = tl.load(x_ptr + own + i * BLOCK, mask=inside, other=0.0).to(tl.float32)
        squares += x * x
        pieces = pieces + (x,)  # type: ignore[assignment]
    scale = 1.0 / tl.sqrt_rn(tl.sum(squares, 1) / GROUP + eps)
    for i in tl.static_range(PIECES):
        weight = tl.load(weight_ptr + tl.program_id(1) * GROUP + i * BLOCK + at, mask=at < GROUP, other=0.0)
        tl.store(y_ptr + dense + i * BLOCK, pieces[i] * scale[:, None] * weight[None, :], mask=inside)
    tl.store(scale_ptr + tl.program_id(1) * rows + row, scale, mask=row < rows)


@triton.jit
def _norm_gradient_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, dy_ptr, skip_ptr, dx_ptr, part_ptr, rows, inner, outer_stride, inner_stride,
    width, SHARE: tl.constexpr, SKIP: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """dx of one group of SHARE rows, ROWS at a time, and what these rows give to the weight's gradient."""
    at = tl.arange(0, BLOCK)
    column = tl.program_id(1) * GROUP + at
    weights, parts = (), ()
    for i in tl.static_range(PIECES):
        weight = tl.load(weight_ptr + column + i * BLOCK, mask=at < GROUP, other=0.0)
        weights = weights + (weight[None, :],)  # type: ignore[assignment]
        parts = parts + (tl.zeros((ROWS, BLOCK), tl.float32),)  # type: ignore[assignment]
    first = tl.program_id(0) * SHARE
    for begin in range(0, SHARE, ROWS):
        row = first + begin + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (at < GROUP)[None, :]
        own = _places(row, inner, outer_stride, inner_stride)[:, None] + column[None, :]
        dense = row.to(tl.int64)[:, None] * width + column[None, :]
        scale = tl.load(scale_ptr + tl.program_id(1) * rows + row, mask=row < rows, other=0.0)[:, None]
        products, units, weighted, sums = tl.zeros((ROWS, BLOCK), tl.float32), (), (), ()
        for i in tl.static_range(PIECES):
            unit = tl.load(x_ptr + own + i * BLOCK, mask=inside, other=0.0).to(tl.float32) * scale
            dy = tl.load(dy_ptr + dense + i * BLOCK, mask=inside, other=0.0).to(tl.float32)
            dunit = dy * weights[i]  # type: ignore[misc]
            products += unit * dunit
            units, weighted = units + (unit,), weighted + (dunit,)  # type: ignore[assignment]
            sums = sums + (parts[i] + dy * unit,)  # type: ignore[assignment,misc]
        parts = sums
        mean = tl.sum(products, 1)[:, None] / GROUP
        for i in tl.static_range(PIECES):
            dx = (weighted[i] - units[i] * mean) * scale
            if SKIP:
                dx += tl.load(skip_ptr + dense + i * BLOCK, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx_ptr + own + i * BLOCK, dx, mask=inside)
    for i in tl.static_range(PIECES):
        tl.store(part_ptr + tl.program_id(0) * width + column + i * BLOCK, tl.sum(parts[i], 0), mask=at < GROUP)


def _order(x: Tensor) -> tuple[int, int, int] | None:
    """How the rows of [..., n] lie: how many the second last index counts, and the strides of both kinds of rows.

    None where they don't lie evenly, or aren't contiguous themselves.
    """
    if x.is_contiguous():
        return 1, x.shape[-1], 0
    if x.dim() == 3 and x.stride(-1) == 1:
        return x.shape[1], x.stride(0), x.stride(1)
    return None


def _tile(group: int) -> tuple[int, int, int, int]:
    """How a program holds a group: columns of a piece, pieces, rows at once; and its warps. By what was fastest."""
    block = group & -group
    if block == group or group // block > _PIECES:
        block = triton.next_power_of_2(group)
        return block, 1, max(1, 2048 // block), min(16, max(4, block // 512))
    return block, group // block, max(1, 1024 // block), 8


class _RMSNorm(torch.autograd.Function):
    """The norm of x, and x for the residual stream."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        order, width = _order(x), x.shape[-1]
        if order is None:
            x, order = x.contiguous(), (1, width, 0)
        rows, groups, (*tile, at_once, warps) = x.numel() // width, width // group, _tile(group)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        scale = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
        _norm_kernel[(triton.cdiv(rows, at_once), groups)](
            x, weight, y, scale, rows, *order, eps, width, group, *tile, at_once, num_warps=warps
        )
        ctx.save_for_backward(x, weight, scale)
        ctx.order, ctx.group = order, group
        return y, x

    @staticmethod
    def backward(ctx: Any, dy: Tensor, skip: Tensor | None) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        width, group = x.shape[-1], ctx.group
        rows, groups, (*tile, at_once, warps) = x.numel() // width, width // group, _tile(group)
        share = triton.cdiv(triton.cdiv(rows, max(1, _PARTS // groups)), at_once) * at_once
        parts = triton.cdiv(rows, share)
        dx, part = torch.empty_like(x), torch.empty(parts, width, dtype=torch.float32, device=x.device)
        dy, skip = dy.contiguous(), None if skip is None else skip.contiguous()
        _norm_gradient_kernel[(parts, groups)](
            x, weight, scale, dy, skip, dx, part, rows, *ctx.order, width, share, skip is not None, group, *tile,
            at_once, num_warps=warps,
        )  # fmt: skip
        return dx, part.sum(0), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
    """`norm.rms_norm`, in x's type; the result is contiguous whatever x's order in memory."""
    normalized: Tensor = _RMSNorm.apply(x, weight, eps, group_size)[0]
    return normalized


def block_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`norm.block_norm`, in x's type."""
    both: tuple[Tensor, Tensor] = _RMSNorm.apply(x, weight, eps, x.shape[-1])
    return both
