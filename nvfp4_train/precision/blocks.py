"""Where the blocks of a matrix lie in memory.

A quantizer reads its operand along the contraction of the GEMM, but the matrix may lie in memory the other way round
(the weight gradient contracts over tokens, the slow index). Transposing it would cost more than quantizing it, so
blocks are views of the memory as it is:

    axis 1, rows 1 x b     [M, N]  ->  [M * N/b, b]     blocks are contiguous
    axis 0, columns b x 1  [M, N]  ->  [M/b, b, N]      blocks run down the columns
    square b x b           [M, N]  ->  [M/b, b, N]      the same view; b neighbouring columns share a scale

Whatever is one number a block is kept compact: [M, N/b], [M/b, N] or [M/b, N/b].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements a chunk. On a CPU its few float32 copies stay in the cache, and each call into PyTorch has enough to do;
# elsewhere the copies are kept small beside the tensors of a training step.
_CHUNK_CPU, _CHUNK = 1 << 18, 1 << 26
# Blocks up to this size are compared by a pooling window on a CPU: reducing a short last dimension is slow there.
_POOLED = 32


@dataclass(frozen=True)
class Blocks:
    """Blocks of a contiguous matrix in memory, whose sizes are multiples of the block.

    Attributes:
        rows, columns: sizes of the matrix as it lies in memory.
        size: elements along the contraction.
        axis: 1 if the contraction runs along columns, 0 if down the rows.
        square: one scale for size x size elements.
    """

    rows: int
    columns: int
    size: int
    axis: int
    square: bool

    @property
    def _down(self) -> bool:
        return self.square or self.axis == 0

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of what is one number a block."""
        rows = self.rows // self.size if self._down else self.rows
        columns = self.columns if self._down and not self.square else self.columns // self.size
        return rows, columns

    def chunk_rows(self, device: torch.device, multiple: int = 1) -> int:
        """Rows to work on at a time.

        Args:
            device: of the matrix.
            multiple: rows that must stay together, beside the block.
        """
        together = max(multiple, self.size if self._down else 1)
        size = _CHUNK_CPU if device.type == "cpu" else _CHUNK
        return max(size // max(1, self.columns) // together, 1) * together

    def chunks(self, chunk_rows: int) -> Iterator[tuple[slice, slice]]:
        """Slices of at most `chunk_rows` rows, and of the compact rows that belong to them; none without elements."""
        ratio = self.size if self._down else 1
        if not self.columns:
            return
        for start in range(0, self.rows, chunk_rows):
            stop = min(start + chunk_rows, self.rows)
            yield slice(start, stop), slice(start // ratio, stop // ratio)

    def view(self, part: Tensor) -> Tensor:
        """View some rows as blocks; `spread` broadcasts against it."""
        if self._down:
            return part.view(-1, self.size, self.columns)
        return part.view(-1, self.size)

    def spread(self, compact: Tensor) -> Tensor:
        """Some compact rows, shaped to broadcast against `view`."""
        if self.square:
            return compact.repeat_interleave(self.size, dim=1).unsqueeze(1)
        return compact.unsqueeze(1) if self._down else compact.reshape(-1, 1)

    def largest(self, magnitudes: Tensor) -> Tensor:
        """Largest magnitude of each block of some rows [rows, columns], compact. NaN where a block holds one."""
        if not self._down:
            return _largest_of_neighbours(magnitudes, self.size)
        columns = magnitudes.view(-1, self.size, self.columns).amax(1)
        return _largest_of_neighbours(columns, self.size) if self.square else columns

    def sums(self, part: Tensor) -> Tensor:
        """Sum of each 1-D block of some rows, elements added in order, as [rows, columns/size] or [rows/size, columns].

        A square block gives the sums of its rows as the operand has them.
        """
        if self.axis == 1:
            # A pooling window is added left to right; a reduction would choose an order of its own.
            windows = part.view(1, -1, self.columns)
            pooled = torch.nn.functional.avg_pool2d(windows, (1, self.size), divisor_override=1)
            return pooled.view(-1, self.columns // self.size)
        lines = part.view(-1, self.size, self.columns)
        total = lines[:, 0].clone()
        for index in range(1, self.size):
            total += lines[:, index]
        return total

    def operand(self, compact: Tensor) -> Tensor:
        """Compact numbers in the operand's own order, its rows along the contraction."""
        return compact if self.axis == 1 else compact.t()


def _largest_of_neighbours(magnitudes: Tensor, size: int) -> Tensor:
    rows, columns = magnitudes.shape
    if magnitudes.device.type == "cpu" and size <= _POOLED:
        return torch.nn.functional.max_pool1d(magnitudes.view(rows, 1, columns), size).view(rows, columns // size)
    return magnitudes.view(rows, columns // size, size).amax(2)


@dataclass(frozen=True)
class Loaded:
    """A matrix ready to be scaled.

    Attributes:
        source: float32 [rows, columns] to read, padded and rotated. May be `out`, or the caller's own tensor.
        out: float32 of the same shape to write.
        block_amax: largest magnitude of each block, compact.
        amax: of the whole tensor, 0-d.
        blocks: where its blocks lie.
        scratch: float32 [k, chunk rows, columns], k buffers for one chunk.
    """

    source: Tensor
    out: Tensor
    block_amax: Tensor
    amax: Tensor
    blocks: Blocks
    scratch: Tensor

    def chunks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Slices of rows, of their compact rows, and the scratch buffers [k, rows, columns] for them."""
        for rows, compact in self.blocks.chunks(max(1, self.scratch.shape[1])):
            yield rows, compact, self.scratch[:, : rows.stop - rows.start]

    def encode(self, rows: slice, factor: Tensor, out: Tensor, divide: bool = False) -> Tensor:
        """Some rows of the source times (or divided by) `factor`, compact numbers of those rows, into `out`."""
        operation = torch.div if divide else torch.mul
        operation(self.blocks.view(self.source[rows]), self.blocks.spread(factor), out=self.blocks.view(out))
        return out


@dataclass(frozen=True)
class Scaled:
    """Scales of a matrix. Elements are `x * encode` (or `x / encode`) rounded; values are `elements * decode * tensor`.

    Attributes:
        encode: float32, compact.
        stored: block scales as stored, compact: float8_e4m3fn, E8M0 bytes or float32; None where there are none.
        decode: float32, compact; None for 1.
        tensor: float32, 0-d or one for each row of the operand; None for 1.
        divide: x is divided by `encode`.
    """

    encode: Tensor
    stored: Tensor | None
    decode: Tensor | None
    tensor: Tensor | None
    divide: bool = False
