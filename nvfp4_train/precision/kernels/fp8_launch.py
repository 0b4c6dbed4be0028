"""FP8 operands as tensor cores take them: codes with the contraction contiguous, scales in cuBLASLt's layouts.

An operand [rows, K] has, by format, `/` rounding up,

    one scale a tensor    0-d
    blocks of 1 x 128     [K / 128, rows]
    blocks of 128 x 128   [rows / 128, K / 128 rounded up to a multiple of 4]

Rows of x that are no multiple of 16 (tokens; widths always are) are filled up with zeros: tensor cores contract so many
at a time, and both operands of a product over tokens must have the same length. Nothing here waits for the GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.fit import TENSOR_CORE_MULTIPLE
from nvfp4_train.precision.formats import ELEMENT_MAX, element_of
from nvfp4_train.precision.fp8 import DTYPES
from nvfp4_train.precision.kernels import fp8
from nvfp4_train.precision.kernels.buffers import EXACT, SLOTS
from nvfp4_train.precision.kernels.launch_nvfp4 import enter_amax
from nvfp4_train.precision.kernels.launcher import launch
from nvfp4_train.precision.shards import WHOLE, Shard, take_largest

_BLOCK = fp8.TILE.value


class Tile(NamedTuple):
    """What a program takes at a time, its warps, and how many registers a thread may have (None: as many as it likes;
    with fewer, more programs run at once)."""

    rows: int
    columns: int
    warps: int
    registers: int | None = None

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.rows), -(-columns // self.columns)

    @property
    def options(self) -> dict[str, Any]:
        return {**EXACT, "num_warps": self.warps, "maxnreg": self.registers}


_TENSOR = Tile(128, 64, 8)
_SQUARE_BLOCKS = Tile(_BLOCK, _BLOCK, 8)
# A program owns whole blocks, and takes so many of their rows at a time.
_ROW_BLOCKS = Tile(32, _BLOCK, 4, 96)


class Codes(NamedTuple):
    """An FP8 operand.

    Attributes:
        values: float8 [rows, K], contiguous: as x lies, or transposed; M filled up.
        scale: decode scales, FP32; see the module's docstring.
    """

    values: Tensor
    scale: Tensor


def padded_rows(rows: int) -> int:
    """Rows of a matrix of `rows` once they are filled up."""
    return -(-rows // TENSOR_CORE_MULTIPLE) * TENSOR_CORE_MULTIPLE


def quantize_codes(
    x: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    amax: Tensor | None = None,
    seen: Tensor | None = None,
    shard: Shard = WHOLE,
) -> tuple[Codes | None, Codes | None]:
    """Quantize contiguous x [M, N] as an operand contracted over N, as one contracted over M, or as both from one read.

    Args:
        x: BF16 or FP32 on a GPU; N fits the format.
        rows, columns: of the two; equal where both are wanted, up to the source.
        amax: FP32 0-d, what a delayed scale follows.
        seen: FP32 0-d, taken in place to the largest of itself and x's amax; with a delayed scale alone.
        shard: which part of a matrix x is; the scale of fp8_current follows the whole's amax, blocks are a rank's own.
    """
    spec = rows or columns
    assert spec is not None
    wanted = rows is not None, columns is not None
    if spec.tile == (1, _BLOCK):
        return _row_blocks(x, spec.power_of_two, *wanted)
    if spec.format == "fp8_block":
        return _square_blocks(x, spec.power_of_two, *wanted)
    return _one_scale(x, spec, *wanted, amax, seen, shard)


def _one_scale(
    x: Tensor, spec: QuantSpec, row: bool, column: bool, amax: Tensor | None, seen: Tensor | None, shard: Shard
) -> tuple[Codes | None, Codes | None]:
    height, width = x.shape
    padded = padded_rows(height)
    element = element_of(spec)
    outs = _rooms(x, padded, row, column, DTYPES[element])
    delayed = amax is not None
    scale = (torch.zeros if delayed else torch.empty)((), dtype=torch.float32, device=x.device)
    if amax is None:
        amax = torch.empty(SLOTS, dtype=torch.int32, device=x.device)
        enter_amax(x, amax)
        take_largest(amax, shard)
    if seen is None:
        seen = torch.zeros_like(scale) if delayed else scale
    numbers = (
        *(height, padded, width, row, column, delayed),
        *(ELEMENT_MAX[element], _TENSOR.rows, _TENSOR.columns),
    )
    grid = _TENSOR.grid(padded, width)
    launch(fp8.tensor_codes_kernel, grid, (x, amax, *outs, scale, seen), numbers, **_TENSOR.options)
    return _codes(outs, (scale, scale), row, column)


def _row_blocks(x: Tensor, power_of_two: bool, row: bool, column: bool) -> tuple[Codes | None, Codes | None]:
    height, width = x.shape
    padded = padded_rows(height)
    outs = _rooms(x, padded, row, column, torch.float8_e4m3fn)
    scales = (
        torch.empty(-(-width // _BLOCK), padded, dtype=torch.float32, device=x.device),
        torch.empty(-(-padded // _BLOCK), width, dtype=torch.float32, device=x.device),
    )
    numbers = (height, padded, width, row, column, power_of_two, _ROW_BLOCKS.rows)
    grid = _SQUARE_BLOCKS.grid(padded, width)
    launch(fp8.row_blocks_kernel, grid, (x, *outs, *scales), numbers, **_ROW_BLOCKS.options)
    return _codes(outs, scales, row, column)


def _square_blocks(x: Tensor, power_of_two: bool, row: bool, column: bool) -> tuple[Codes | None, Codes | None]:
    height, width = x.shape
    assert height % TENSOR_CORE_MULTIPLE == 0, x.shape
    outs = _rooms(x, height, row, column, torch.float8_e4m3fn)
    blocks = _SQUARE_BLOCKS.grid(height, width)
    strides = [-(-count // 4) * 4 for count in blocks]
    # GEMMs also read what their layout has beyond the blocks.
    scales = (
        torch.zeros(blocks[0], strides[1], dtype=torch.float32, device=x.device),
        torch.zeros(blocks[1], strides[0], dtype=torch.float32, device=x.device),
    )
    numbers = (height, width, strides[1], strides[0], row, column, power_of_two)
    launch(fp8.square_blocks_kernel, blocks, (x, *outs, *scales), numbers, **_SQUARE_BLOCKS.options)
    return _codes(outs, scales, row, column)


def _rooms(x: Tensor, padded: int, row: bool, column: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for the codes [padded, N] and [N, padded]; one stands in for the other where that is not wanted."""
    first = torch.empty(padded, x.shape[1], dtype=dtype, device=x.device) if row else None
    second = torch.empty(x.shape[1], padded, dtype=dtype, device=x.device) if column else first
    assert second is not None
    return second if first is None else first, second


def _codes(
    outs: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor], row: bool, column: bool
) -> tuple[Codes | None, Codes | None]:
    first = Codes(outs[0], scales[0]) if row else None
    return first, Codes(outs[1], scales[1]) if column else None
