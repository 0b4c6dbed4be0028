"""Which operands the kernels serve, and their launches.

`serves` says whether the kernels know an operand; a caller then uses them and never falls back from them. Nothing here
waits for the GPU: scales and amaxes stay in its memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.kernels import nvfp4
from nvfp4_train.precision.rotation import FIXED_SIGNS
from nvfp4_train.precision.shards import WHOLE, Pieces, Shard, take_largest

# Bit i is set where the published sign i is -1; -1 stands for no rotation.
_SIGNS = sum(1 << i for i, sign in enumerate(FIXED_SIGNS) if sign < 0)
_UNROTATED = -1
_TILE = 16
# A product and a sum fused into one operation would round once where the reference rounds twice.
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}
_AMAX_SIZE = nvfp4.AMAX_SIZE.value


class Made(NamedTuple):
    """A quantized operand: values BF16 in the layout of x; s_dec and amax FP32 0-d."""

    values: Tensor
    scale: Tensor
    amax: Tensor


class _Shape(NamedTuple):
    """Columns a program takes (`block`), its warps, and how many groups of 16 rows it takes one after the other."""

    block: int
    warps: int
    groups: int = 1


# By what was fastest on an H200 at 8192 x 2048 to 8192 x 20480; tests/benchmarks/results/gpu.md.
_AMAX = _Shape(512, 4, 2)
_ONE_LAYOUT = _Shape(512, 4)
_BOTH_LAYOUTS = _Shape(1024, 8)
_WEIGHT_AMAX = _Shape(8192, 8)
_WEIGHT_VALUES = _Shape(512, 4)


def serves(x: Tensor, spec: QuantSpec, axis: int, shard: Shard = WHOLE) -> bool:
    """Whether the kernels quantize contiguous x [M, N] by this spec, contracted over `axis`.

    They know plain nvfp4 where M and N are multiples of 16, and of rotations the published one: 16, fixed signs, along
    the rows of x. With stochastic rounding, a part of a matrix must be made of whole blocks of the whole.
    """
    plain = spec.format == "nvfp4" and spec.scaling == "tensor" and not spec.four_over_six and not spec.correction
    if not plain or x.shape[0] % _TILE or x.shape[1] % _TILE or x.numel() == 0:
        return False
    if spec.tile == (_TILE, _TILE):
        return spec.rounding == "nearest"
    if spec.rounding == "stochastic" and not all(extent is None or extent.aligned(_TILE) for extent in shard):
        return False
    return spec.rotation is None or (axis == 0 and spec.rotation == 16 and spec.signs == "fixed")


def quantize_operand(x: Tensor, spec: QuantSpec, axis: int, key: int, shard: Shard = WHOLE) -> Made:
    """Quantize contiguous x [M, N], contracted over `axis`, by a spec that the kernels serve."""
    if spec.tile == (_TILE, _TILE):
        return quantize_square(x, shard)
    rows, columns = (spec, None) if axis == 1 else (None, spec)
    made = quantize_rows_and_columns(x, rows, columns, key, key, shard)[1 - axis]
    assert made is not None
    return made


def quantize_rows_and_columns(
    x: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_key: int = 0,
    column_key: int = 0,
    shard: Shard = WHOLE,
) -> tuple[Made | None, Made | None]:
    """Quantize contiguous x [M, N] in 1x16 blocks along its columns, along its rows (as x^T), or both from one read.

    Args:
        x: BF16 or FP32 on a GPU; M and N multiples of 16.
        rows: spec of the operand contracted over N, or None.
        columns: spec of the operand x^T contracted over M, or None; it is kept in the layout of x.
        row_key, column_key: 64-bit keys of stochastic rounding.
        shard: which part of a matrix x is; see `quantizer.quantize_values`.
    """
    height, width = x.shape
    amax, scales = _buffers(x)
    wanted = rows is not None, columns is not None
    signs = _SIGNS if columns is not None and columns.rotation else _UNROTATED
    groups, shape = height // _TILE, _AMAX
    block = min(shape.block, triton.next_power_of_2(width))
    grid = (triton.cdiv(groups, shape.groups), triton.cdiv(width, block))
    nvfp4.amax_kernel[grid](
        x, amax, groups, width, *wanted, signs, block, shape.groups, num_warps=shape.warps, **_EXACT
    )
    take_largest(amax, shard)
    outs = [torch.empty_like(x, dtype=torch.bfloat16) if spec else x for spec in (rows, columns)]
    shape = _BOTH_LAYOUTS if all(wanted) else _ONE_LAYOUT
    block = min(shape.block, triton.next_power_of_2(width))
    stochastic = [spec is not None and spec.rounding == "stochastic" for spec in (rows, columns)]
    keys = [_signed(key) if random else 0 for key, random in zip((row_key, column_key), stochastic, strict=True)]
    nvfp4.values_kernel[(groups, triton.cdiv(width, block))](
        x,
        amax,
        *outs,
        scales,
        *_block_tables(x, shard),
        width,
        *_whole_shape(x, shard),
        *keys,
        *wanted,
        *stochastic,
        signs,
        shard.split,
        block,
        num_warps=shape.warps,
        **_EXACT,
    )
    of_rows = None if rows is None else Made(outs[0], scales[0], scales[1])
    of_columns = None if columns is None else Made(outs[1], scales[2], scales[3])
    return of_rows, of_columns


def quantize_square(w: Tensor, shard: Shard = WHOLE) -> Made:
    """Quantize contiguous w [M, N], FP32 or BF16, in 16x16 tiles; M and N multiples of 16. Serves both contractions."""
    height, width = w.shape
    amax, scales = _buffers(w)
    enter_amax(w, amax)
    take_largest(amax, shard)
    out = torch.empty_like(w, dtype=torch.bfloat16)
    block = min(_WEIGHT_VALUES.block, triton.next_power_of_2(width))
    nvfp4.weight_values_kernel[(height // _TILE, triton.cdiv(width, block))](
        w, amax, out, scales, width, block, num_warps=_WEIGHT_VALUES.warps, **_EXACT
    )
    return Made(out, scales[0], scales[1])


def enter_amax(x: Tensor, amax: Tensor) -> None:
    """Enter the largest magnitude of a contiguous tensor into zeroed slots."""
    block = min(_WEIGHT_AMAX.block, triton.next_power_of_2(x.numel()))
    grid = (triton.cdiv(x.numel(), block),)
    nvfp4.weight_amax_kernel[grid](x, amax, x.numel(), block, num_warps=_WEIGHT_AMAX.warps, **_EXACT)


def _buffers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Zeroed amax slots, and room for s_dec and amax, of an operand and of its rotated transpose."""
    amax = torch.zeros(2 * _AMAX_SIZE, dtype=torch.int32, device=x.device)
    return amax, torch.empty(4, dtype=torch.float32, device=x.device)


def _whole_shape(x: Tensor, shard: Shard) -> tuple[int, int]:
    rows, columns = (n if axis is None else axis.size for axis, n in zip(shard, x.shape, strict=True))
    return rows, columns


def _block_tables(x: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
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
    starts = [torch.arange(start // _TILE, (start + count) // _TILE) for start, count in pieces]
    return torch.cat(starts).to(device)


def _signed(key: int) -> int:
    """The same 64 bits as a signed number, so that every key gives the kernel the same type."""
    return key - (1 << 64) if key >> 63 else key
