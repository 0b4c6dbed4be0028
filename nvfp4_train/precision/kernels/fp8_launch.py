"""FP8 operands as tensor cores take them: codes with the contraction contiguous, scales in cuBLASLt's layouts.

An operand [rows, K] has, by format,

    one scale a tensor    0-d
    blocks of 1 x 128     [K / 128, rows]
    blocks of 128 x 128   [rows / 128, K / 128 rounded up to a multiple of 4]

Rows of x that are no multiple of a block (tokens; widths always are) are filled up with zeros, so that both operands
of a product over tokens have the same length. Nothing here waits for the GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.fit import WHOLE_TENSOR_MULTIPLE
from nvfp4_train.precision.formats import ELEMENT_MAX, element_of
from nvfp4_train.precision.fp8 import DTYPES
from nvfp4_train.precision.kernels import fp8, nvfp4
from nvfp4_train.precision.kernels.launch import enter_amax
from nvfp4_train.precision.shards import WHOLE, Shard, take_largest

_BLOCK = fp8.TILE.value
_EXACT: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 8}


class Codes(NamedTuple):
    """An FP8 operand.

    Attributes:
        values: float8 in the layout of x, [M, N] with M filled up; the contracted dimension is contiguous in memory.
        scale: decode scales, FP32; see the module's docstring.
        amax: of x, FP32 0-d; None of a block format, which nobody asks for it.
    """

    values: Tensor
    scale: Tensor
    amax: Tensor | None


def padded_rows(rows: int, spec: QuantSpec) -> int:
    """Rows of a matrix of `rows` once they are filled up."""
    multiple = _BLOCK if spec.format == "fp8_block" else WHOLE_TENSOR_MULTIPLE
    return triton.cdiv(rows, multiple) * multiple


def quantize_codes(
    x: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    amax: Tensor | None = None,
    shard: Shard = WHOLE,
) -> tuple[Codes | None, Codes | None]:
    """Quantize contiguous x [M, N] as an operand contracted over N, as one contracted over M, or as both from one read.

    Args:
        x: BF16 or FP32 on a GPU; N fits the format.
        rows, columns: of the two; equal where both are wanted, up to the source.
        amax: FP32 0-d, what a delayed scale follows.
        shard: which part of a matrix x is; the scale of fp8_current follows the whole's amax, blocks are a rank's own.
    """
    spec = rows or columns
    assert spec is not None
    if spec.format != "fp8_block":
        return _one_scale(x, spec, rows is not None, columns is not None, amax, shard)
    assert spec.tile is not None
    launch = _square_blocks if spec.tile[0] > 1 else _row_blocks
    return launch(x, spec.power_of_two, rows is not None, columns is not None)


def _one_scale(
    x: Tensor, spec: QuantSpec, row: bool, column: bool, history: Tensor | None, shard: Shard
) -> tuple[Codes | None, Codes | None]:
    height, width = x.shape
    padded = padded_rows(height, spec)
    element = element_of(spec)
    outs = _outs(x, padded, row, column, DTYPES[element])
    scales = torch.empty(2, dtype=torch.float32, device=x.device)
    delayed = history is not None
    slots = torch.zeros(nvfp4.AMAX_SIZE.value + 1, dtype=torch.int32, device=x.device)
    if not delayed:
        enter_amax(x, slots)
        take_largest(slots, shard)
    fp8.tensor_codes_kernel[_grid(padded, width)](
        x, slots, history if delayed else scales, *_pointers(outs), scales, height, padded, width, row, column, delayed,
        ELEMENT_MAX[element], **_EXACT,
    )  # fmt: skip
    return _codes(outs, (scales[0], scales[0]), row, column, scales[1])


def _row_blocks(x: Tensor, power_of_two: bool, row: bool, column: bool) -> tuple[Codes | None, Codes | None]:
    height, width = x.shape
    padded = triton.cdiv(height, _BLOCK) * _BLOCK
    outs = _outs(x, padded, row, column, torch.float8_e4m3fn)
    scales = (
        torch.empty(width // _BLOCK, padded, dtype=torch.float32, device=x.device),
        torch.empty(padded // _BLOCK, width, dtype=torch.float32, device=x.device),
    )
    fp8.row_blocks_kernel[_grid(padded, width)](
        x, *_pointers(outs), *scales, height, padded, width, row, column, power_of_two, **_EXACT
    )
    return _codes(outs, scales, row, column, None)


def _square_blocks(x: Tensor, power_of_two: bool, row: bool, column: bool) -> tuple[Codes | None, Codes | None]:
    height, width = x.shape
    assert height % _BLOCK == 0, x.shape
    outs = _outs(x, height, row, column, torch.float8_e4m3fn)
    blocks = height // _BLOCK, width // _BLOCK
    scales = [
        torch.zeros(first, triton.cdiv(second, 4) * 4, dtype=torch.float32, device=x.device)
        for first, second in (blocks, blocks[::-1])
    ]
    fp8.square_blocks_kernel[_grid(height, width)](
        x,
        *_pointers(outs),
        *scales,
        height,
        width,
        scales[0].shape[1],
        scales[1].shape[1],
        row,
        column,
        power_of_two,
        **_EXACT,
    )
    return _codes(outs, (scales[0], scales[1]), row, column, None)


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(rows, _BLOCK), triton.cdiv(columns, _BLOCK)


def _outs(x: Tensor, padded: int, row: bool, column: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for the codes [padded, N] and [N, padded]; one stands in for the other where that is not wanted."""
    first = torch.empty(padded, x.shape[1], dtype=dtype, device=x.device) if row else None
    second = torch.empty(x.shape[1], padded, dtype=dtype, device=x.device) if column else first
    assert second is not None
    return second if first is None else first, second


def _pointers(outs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """As the kernels write them: bytes as they lie, transposed ones by four."""
    return outs[0], outs[1].view(torch.int32)


def _codes(
    outs: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor], row: bool, column: bool, amax: Tensor | None
) -> tuple[Codes | None, Codes | None]:
    first = Codes(outs[0], scales[0], amax) if row else None
    return first, Codes(outs[1].t(), scales[1], amax) if column else None
