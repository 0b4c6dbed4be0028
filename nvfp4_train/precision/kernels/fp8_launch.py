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
from nvfp4_train.precision.kernels import fp8
from nvfp4_train.precision.kernels.buffers import SLOTS
from nvfp4_train.precision.kernels.launch_nvfp4 import enter_amax
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
    """Quantize contiguous x [M, N] as an operand contracted over N, as one contracted over M, or as both.

    Args:
        x: BF16 or FP32 on a GPU; N fits the format.
        rows, columns: of the two; equal where both are wanted, up to the source.
        amax: FP32 0-d, what a delayed scale follows.
        shard: which part of a matrix x is; the scale of fp8_current follows the whole's amax, blocks are a rank's own.
    """
    spec = rows or columns
    assert spec is not None
    if spec.tile == (1, _BLOCK):
        return _row_blocks(x, spec.power_of_two, rows is not None, columns is not None)
    slots = None if spec.format == "fp8_block" or amax is not None else _amax_slots(x, shard)
    first, second = (
        None if wanted is None else _one_layout(x, spec, transposed, amax, slots)
        for wanted, transposed in ((rows, False), (columns, True))
    )
    return first, second


def _one_layout(x: Tensor, spec: QuantSpec, transposed: bool, history: Tensor | None, slots: Tensor | None) -> Codes:
    """Codes that are the same in both layouts; see `kernels/fp8.py` for why each has a launch of its own."""
    if spec.format == "fp8_block":
        return _square_blocks(x, spec.power_of_two, transposed)
    return _one_scale(x, spec, transposed, history, _slots(x) if slots is None else slots)


def _slots(x: Tensor) -> Tensor:
    """Zeroed amax slots, and one number behind them."""
    return torch.zeros(SLOTS + 1, dtype=torch.int32, device=x.device)


def _amax_slots(x: Tensor, shard: Shard) -> Tensor:
    """Slots with the amax of x, or of the whole that it is a part of."""
    slots = _slots(x)
    enter_amax(x, slots)
    take_largest(slots, shard)
    return slots


def _one_scale(x: Tensor, spec: QuantSpec, transposed: bool, history: Tensor | None, slots: Tensor) -> Codes:
    height, width = x.shape
    padded = padded_rows(height, spec)
    element = element_of(spec)
    out = _room(x, padded, transposed, DTYPES[element])
    scales = torch.empty(2, dtype=torch.float32, device=x.device)
    delayed = history is not None
    fp8.tensor_codes_kernel[_grid(padded, width)](
        x, slots, history if delayed else scales, out, out.view(torch.int32), scales, height, padded, width,
        not transposed, transposed, delayed, ELEMENT_MAX[element], **_EXACT,
    )  # fmt: skip
    return Codes(out.t() if transposed else out, scales[0], scales[1])


def _row_blocks(x: Tensor, power_of_two: bool, row: bool, column: bool) -> tuple[Codes | None, Codes | None]:
    height, width = x.shape
    padded = triton.cdiv(height, _BLOCK) * _BLOCK
    layouts = [transposed for transposed, wanted in ((False, row), (True, column)) if wanted]
    outs = [_room(x, padded, transposed, torch.float8_e4m3fn) for transposed in layouts]
    scales = (
        torch.empty(width // _BLOCK, padded, dtype=torch.float32, device=x.device),
        torch.empty(padded // _BLOCK, width, dtype=torch.float32, device=x.device),
    )
    fp8.row_blocks_kernel[_grid(padded, width)](
        x, outs[0], outs[-1].view(torch.int32), *scales, height, padded, width, row, column, power_of_two, **_EXACT
    )
    first = Codes(outs[0], scales[0], None) if row else None
    return first, Codes(outs[-1].t(), scales[1], None) if column else None


def _square_blocks(x: Tensor, power_of_two: bool, transposed: bool) -> Codes:
    height, width = x.shape
    assert height % _BLOCK == 0, x.shape
    out = _room(x, height, transposed, torch.float8_e4m3fn)
    rows, contracted = (size // _BLOCK for size in out.shape)
    scale = torch.zeros(rows, triton.cdiv(contracted, 4) * 4, dtype=torch.float32, device=x.device)
    fp8.square_blocks_kernel[_grid(height, width)](
        x, out, out.view(torch.int32), scale, scale, height, width, scale.shape[1], scale.shape[1],
        not transposed, transposed, power_of_two, **_EXACT,
    )  # fmt: skip
    return Codes(out.t() if transposed else out, scale, None)


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(rows, _BLOCK), triton.cdiv(columns, _BLOCK)


def _room(x: Tensor, padded: int, transposed: bool, dtype: torch.dtype) -> Tensor:
    """Room for the codes of x with so many rows."""
    shape = (x.shape[1], padded) if transposed else (padded, x.shape[1])
    return torch.empty(shape, dtype=dtype, device=x.device)
