"""What the launches of all formats share: their result, and the small tensors beside an operand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_train.precision.kernels import device
from nvfp4_train.precision.rotation import FIXED_SIGNS
from nvfp4_train.precision.rounding import Key, signed
from nvfp4_train.precision.shards import Pieces, Shard

# A product and a sum fused into one operation would round once where the reference rounds twice.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}
SLOTS = device.SLOTS.value
UNROTATED = -1
# Elements that share a Philox call: parts of a matrix are placed in the whole by such blocks.
CALL = 16


class Made(NamedTuple):
    """A quantized operand in the layout of x: values BF16 (fp8_block: FP32); scale and amax FP32 0-d.

    Formats without a tensor scale have neither; nobody looks for their amax.
    """

    values: Tensor
    scale: Tensor | None
    amax: Tensor | None


class Shape(NamedTuple):
    """Columns (of some rows), or elements, that a program takes at a time, and its warps."""

    block: int
    warps: int


def sign_bits(size: int) -> int:
    """Bit i is set where fixed sign i of a rotation is -1."""
    return sum(1 << i for i in range(size) if FIXED_SIGNS[i % len(FIXED_SIGNS)] < 0)


def slots(x: Tensor, operands: int) -> tuple[Tensor, Tensor]:
    """Amax slots of some operands, and room for the scale and amax of each."""
    amax = torch.empty(operands * SLOTS, dtype=torch.int32, device=x.device)
    return amax, torch.empty(2 * operands, dtype=torch.float32, device=x.device)


def whole_shape(x: Tensor, shard: Shard) -> tuple[int, int]:
    """Shape of the matrix that x is a part of."""
    rows, columns = (n if axis is None else axis.size for axis, n in zip(shard, x.shape, strict=True))
    return rows, columns


def block_tables(x: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Where each block of 16 rows, and of 16 columns, lies in the whole, int64; not read where x is the whole."""
    if not shard.split:
        return x, x
    rows, columns = (
        _block_table(((0, n),) if axis is None else axis.pieces, x.device)
        for axis, n in zip(shard, x.shape, strict=True)
    )
    return rows, columns


@lru_cache(maxsize=256)
def _block_table(pieces: Pieces, device: torch.device) -> Tensor:
    starts = [torch.arange(start // CALL, (start + count) // CALL) for start, count in pieces]
    return torch.cat(starts).to(device)


def keys_there(keys: Sequence[Key], wanted: Sequence[bool], like: Tensor) -> list[Tensor]:
    """The keys in the memory of `like`'s GPU, where kernels read them; `like` itself for one that is not read.

    A launch argument would be a number for good once the launch is part of a CUDA graph.
    """
    there = []
    for key, read in zip(keys, wanted, strict=True):
        if isinstance(key, int) and read:
            key = torch.tensor(signed(key), device=like.device)
        there.append(key if isinstance(key, Tensor) and read else like)
    return there
