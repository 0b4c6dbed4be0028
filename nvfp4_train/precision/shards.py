"""Where a rank's part of a matrix lies in the whole matrix, and the largest magnitude over the ranks that share it.

Two things of a quantized tensor belong to the whole tensor, however it is split: the amax that its tensor scale
follows, and the index that gives each element its random bits. A rank's indices along a dimension need not be
neighbours in the whole: Mamba's in_proj packs five parts that are split one by one, and a context-parallel rank holds
an early and a late piece of each sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Pieces = tuple[tuple[int, int], ...]
_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True)
class Axis:
    """One dimension that is split over ranks.

    Attributes:
        size: length in the whole matrix.
        pieces: first index in the whole and length of each of this rank's pieces, in the rank's order.
        group: the ranks that share the dimension.
    """

    size: int
    pieces: Pieces
    group: dist.ProcessGroup | None = None

    @property
    def length(self) -> int:
        """Indices on this rank."""
        return sum(count for _, count in self.pieces)

    def aligned(self, multiple: int) -> bool:
        """Whether the whole and all pieces begin and end at multiples of `multiple`."""
        return self.size % multiple == 0 and all(number % multiple == 0 for piece in self.pieces for number in piece)

    def padded(self, length: int) -> Axis:
        """This rank's last piece drawn out to `length` indices in all, for a matrix that was filled up with zeros."""
        if length == self.length:
            return self
        start, count = self.pieces[-1]
        missing = length - self.length
        return replace(self, size=self.size + missing, pieces=(*self.pieces[:-1], (start, count + missing)))

    def positions(self, device: torch.device | str) -> Tensor:
        """Index in the whole of each of this rank's indices, int64 [length]."""
        return _positions(self.pieces, torch.device(device))

    def blocks(self, size: int) -> Axis:
        """The same dimension counted in blocks of `size`, each of which stands where its first element does."""
        firsts = self.positions("cpu")[::size].div(size, rounding_mode="floor").tolist()
        return replace(self, size=-(-self.size // size), pieces=tuple((first, 1) for first in firsts))


@lru_cache(maxsize=1024)
def _positions(pieces: Pieces, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(start, start + count, device=device) for start, count in pieces])


class Shard(NamedTuple):
    """Which part of a matrix [M, N] a rank holds: None for a dimension that it holds as a whole."""

    rows: Axis | None = None
    columns: Axis | None = None

    @property
    def split(self) -> bool:
        """Whether this is less than the whole."""
        return self != WHOLE

    def extents(self, shape: tuple[int, int]) -> tuple[int | Axis, int | Axis]:
        """Of a matrix of this (padded) shape: each dimension's length where it is whole, else where it lies."""
        rows, columns = (n if axis is None else axis.padded(n) for axis, n in zip(self, shape, strict=True))
        return rows, columns


WHOLE = Shard()


def take_largest(amax: Tensor, axes: Iterable[Axis | None]) -> None:
    """In place, the largest over all ranks that share these dimensions; NaN counts as larger than infinity.

    Args:
        amax: FP32 magnitudes, or their bits as int32, which have the same order; contiguous.
        axes: those over whose groups to look; None is passed over.
    """
    for axis in axes:
        if axis is not None and axis.group is not None:
            bits = amax.view(torch.int32).bitwise_and_(_MAGNITUDE)
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=axis.group)
