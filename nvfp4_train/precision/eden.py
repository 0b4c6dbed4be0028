"""Quartet II's backward operand: round to nearest, and take the bias out by a correction of the block scales.

Stochastic rounding is unbiased at the price of twice the error of rounding to nearest. Here elements are rounded to
nearest; after a random rotation the error they make shrinks a group of 128 by a factor that can be measured and
undone:

    v      = 6 / (0.93 * 17/16)                    clips a little, which costs less than a wide grid
    s_dec  = amax / (255.99 * v)                   amax of the rotated tensor
    S      = e4m3(amax_block / v / s_dec), 1 where that is 0
    y      = x / (S * s_dec)
    q      = e2m1(clamp(y, -6, 6)), to nearest
    c      = sum(y * y) / sum(y * q) over the group of 128, 1 where the divisor is 0
    S'     = S * c, rounded STOCHASTICALLY to a neighbouring E4M3 value
    value  = q * S' * s_dec

The sums are FP32: elements of a block of 16 in order, then the eight blocks by halves (4 + 4, 2 + 2, 1 + 1). The
random byte of a block scale is that of its index in the matrix of block scales, counted along the contraction as
elements are.

What is left of the shrinking: c counts the blocks of a group alike, in units of their own scales, as the released code
does; <x,Q(x)> would weigh each by its S^2. On average the decoded copy of Gaussian data is .05% shorter than x along x,
where nearest rounding's is .45% and that of NVFP4's stochastic rounding, which clips, .33%.
Source: "Quartet II", arXiv 2601.22813.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_train.precision.blocks import Blocks, Loaded, Scaled
from nvfp4_train.precision.nvfp4 import E4M3_MAX, constant, to_e4m3
from nvfp4_train.precision.rounding import Key, random_bytes, round_nearest_, round_stochastic_
from nvfp4_train.precision.shards import Axis

GROUP = 128
V = 6.0 / (0.93 * 17.0 / 16.0)
TOP = 255.99 * V
_SMALLEST = 2.0**-149


def scale(loaded: Loaded, amax: Tensor, key: Key, extents: tuple[int | Axis, int | Axis]) -> Scaled:
    """Corrected NVFP4 scales of a rotated matrix.

    Args:
        loaded: the matrix, rotated in groups of 128.
        amax: what the tensor scale follows, 0-d.
        key: 64-bit key of the random bits of the block scales.
        extents: of the matrix, as `Shard.extents` gives them.
    """
    blocks = loaded.blocks
    finite = torch.isfinite(amax)
    s_dec = amax / constant(TOP, amax)
    s_dec = torch.where(finite & (s_dec > 0), s_dec, 1.0)
    stored = to_e4m3(loaded.block_amax / constant(V, amax) / s_dec).float()
    stored = torch.where(stored == 0, 1.0, stored)
    divisor = torch.clamp(stored * s_dec, min=_SMALLEST)
    corrected = stored * _corrections(loaded, divisor)
    rows, columns = extents if blocks.axis == 1 else extents[::-1]
    columns = columns.blocks(blocks.size) if isinstance(columns, Axis) else columns // blocks.size
    random = random_bytes(key, rows, columns, axis=blocks.axis, device=amax.device)
    corrected = torch.nan_to_num(corrected, nan=E4M3_MAX)
    corrected = round_stochastic_(corrected, corrected.new_empty(3, *corrected.shape), "e4m3", random)
    tensor = torch.where(finite, s_dec, float("nan"))
    return Scaled(divisor, corrected.to(torch.float8_e4m3fn), corrected, tensor, divide=True)


def _corrections(loaded: Loaded, divisor: Tensor) -> Tensor:
    """Factor c of each block's group, compact float32."""
    blocks = loaded.blocks
    squares, products = torch.empty_like(divisor), torch.empty_like(divisor)
    for rows, compact, (y, q, scratch) in loaded.chunks():
        loaded.encode(rows, divisor[compact], y, divide=True)
        round_nearest_(q.copy_(y), scratch, "e2m1")
        products[compact] = blocks.sums(q.mul_(y))
        squares[compact] = blocks.sums(y.mul_(y))
    squares, products = _group_sums(squares, blocks), _group_sums(products, blocks)
    c = torch.where(products == 0, 1.0, squares / products)
    return c.repeat_interleave(GROUP // blocks.size, dim=blocks.axis)


def _group_sums(sums: Tensor, blocks: Blocks) -> Tensor:
    along = blocks.axis
    grouped = sums.unflatten(along, (sums.shape[along] * blocks.size // GROUP, GROUP // blocks.size))
    while grouped.shape[along + 1] > 1:
        first, second = grouped.chunk(2, along + 1)
        grouped = first + second
    return grouped.squeeze(along + 1)
