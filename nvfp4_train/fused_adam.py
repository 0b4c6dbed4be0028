"""AdamW on a GPU: one pass over all parameters, gradients and moments, which takes the gradients times a factor that
lies in the GPU's memory: whoever launches it need not know the factor, nor whether there will be an update at all.

PyTorch's fused AdamW can divide gradients by a scale, and writes them back then: 9.9 ms for the billion parameters of
`1b` on an H200, where a pass for the factor and its kernel without a scale take 10.5. This one takes 7.0, as a copy of
as many bytes would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 1024  # a program's share of a tensor; the last one's is smaller
_ADDRESSES = 5  # of a table's row: parameter, gradient, both moments, and the number of elements


@triton.jit
def _floats(address, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    pointer = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    tensors, shares, factor, decay, mean_weight, square_decay, square_weight, step_size, correction, eps,
    ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One share of one tensor: row of `tensors` and number of the share, as `shares` says."""
    times = tl.load(factor).to(tl.float32)
    row = tensors + tl.load(shares + 2 * tl.program_id(0)) * COLUMNS
    parameters, gradients = _floats(tl.load(row), ALIGNED), _floats(tl.load(row + 1), ALIGNED)
    means, squares = _floats(tl.load(row + 2), ALIGNED), _floats(tl.load(row + 3), ALIGNED)
    size = tl.where(times == times, tl.load(row + 4), 0)  # nothing of it where the factor is NaN
    if ALIGNED:
        size = tl.multiple_of(size, 4)
    at = tl.load(shares + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gradient = tl.load(gradients + at, mask=inside) * times
    mean, square = tl.load(means + at, mask=inside), tl.load(squares + at, mask=inside)
    parameter = tl.load(parameters + at, mask=inside) * decay
    mean += mean_weight * (gradient - mean)
    square = square * square_decay + square_weight * gradient * gradient
    parameter -= step_size * (mean / (tl.sqrt_rn(square) / correction + eps))
    tl.store(means + at, mean, mask=inside)
    tl.store(squares + at, square, mask=inside)
    tl.store(parameters + at, parameter, mask=inside)


class _Table(NamedTuple):
    """Some tensors of an update: their addresses and sizes, int64 [tensors, 5], and its shares, int32 [shares, 2]."""

    tensors: Tensor
    shares: Tensor
    aligned: bool


Together = tuple[Tensor, Tensor, Tensor, Tensor]


def _tables(updates: Sequence[Together]) -> list[_Table]:
    """One of all tensors whose addresses and sizes allow accesses of four numbers, one of the others."""
    rows = [[*(tensor.data_ptr() for tensor in update), update[0].numel()] for update in updates]
    tables, device = [], updates[0][0].device
    for aligned in (True, False):
        chosen = [row for row in rows if all(place % 16 == 0 for place in (*row[:4], 4 * row[4])) == aligned]
        if chosen:
            counts = torch.tensor([triton.cdiv(row[4], _ELEMENTS) for row in chosen])
            number = torch.arange(len(chosen)).repeat_interleave(counts)
            share = torch.arange(len(number)) - (counts.cumsum(0) - counts)[number]
            shares = torch.stack((number, share), dim=1).to(device, torch.int32)
            tables.append(_Table(torch.tensor(chosen, dtype=torch.int64).to(device), shares, aligned))
    return tables


class FusedAdamW(torch.optim.AdamW):
    """AdamW of FP32 parameters on one GPU, with the state of torch's.

    Attributes:
        factor: the gradients count times this much, FP64 [] on the GPU; where it is NaN, `step` changes nothing but
            its counts, see `uncount`.
    """

    factor: Tensor
    _counts: list[Tensor] | None = None  # of the last step
    _made: dict[int, tuple[list[int], list[_Table]]] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; its moments and count must be there."""
        assert closure is None
        self._counts = [
            self.state[p]["step"] for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if self._counts:
            torch._foreach_add_(self._counts, 1)
        for number, group in enumerate(self.param_groups):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(number, group, parameters)

    def uncount(self) -> None:
        """The last step found a NaN as its factor: it does not count."""
        if self._counts:
            torch._foreach_sub_(self._counts, 1)

    def _update(self, number: int, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        count, (beta1, beta2) = states[0]["step"].item(), group["betas"]
        for table in self._tables_of(number, parameters, states):
            _adamw_kernel[(len(table.shares),)](
                table.tensors,
                table.shares,
                self.factor,
                1 - group["lr"] * group["weight_decay"],
                1 - beta1,
                beta2,
                1 - beta2,
                group["lr"] / (1 - beta1**count),
                math.sqrt(1 - beta2**count),
                group["eps"],
                table.aligned,
                _ADDRESSES,
                _ELEMENTS,
            )

    def _tables_of(self, number: int, parameters: list[Tensor], states: list[dict[str, Tensor]]) -> list[_Table]:
        """Those of a group, made anew where a tensor has moved."""
        made = self._made = {} if self._made is None else self._made
        updates = [(p, p.grad, s["exp_avg"], s["exp_avg_sq"]) for p, s in zip(parameters, states, strict=True)]
        places = [tensor.data_ptr() for update in updates for tensor in update]  # type: ignore[union-attr]
        if number not in made or made[number][0] != places:
            for update in updates:
                assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in update)  # type: ignore[union-attr]
            made[number] = (places, _tables(updates))  # type: ignore[arg-type]
        return made[number][1]
