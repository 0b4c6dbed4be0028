"""Linears for tests of the model: FP32 weights, BF16 in and out, FP32 products over BF16-rounded operands."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from models.hybrid import LinearClasses


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, reduce: bool, sequence: bool, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.reduce, ctx.sequence, ctx.group = reduce, sequence, group
        x = _gather(x, group) if sequence else x
        return (x.float() @ weight.bfloat16().float().t()).bfloat16()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x = _gather(x, ctx.group) if ctx.sequence else x
        gradient = gradient.float()
        dx = gradient @ weight.bfloat16().float()
        if ctx.reduce:
            dist.all_reduce(dx, group=ctx.group)
        if ctx.sequence:
            part = dx.new_empty((dx.shape[0] // ctx.group.size(), *dx.shape[1:]))
            dist.reduce_scatter_tensor(part, dx, group=ctx.group)
            dx = part
        dw = gradient.flatten(0, -2).t() @ x.flatten(0, -2).float()
        return dx.bfloat16(), dw, None, None, None


class _Plain:
    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **kwargs: Any) -> Tensor:
        assert bias is None
        assert input.dtype == torch.bfloat16
        assert weight.dtype == torch.float32
        reduce, sequence = kwargs["allreduce_dgrad"], kwargs["sequence_parallel"]
        return _Products.apply(input, weight, reduce, sequence, kwargs["tp_group"])


class PlainColumnLinear(_Plain, ColumnParallelLinear):
    pass


class PlainRowLinear(_Plain, RowParallelLinear):
    pass


PLAIN = LinearClasses(PlainColumnLinear, PlainRowLinear)
