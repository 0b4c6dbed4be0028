"""Launches of NVFP4, four over six among it: a pass for the amaxes, then a pass for the values."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.kernels import nvfp4
from nvfp4_train.precision.kernels.buffers import (
    EXACT,
    SLOTS,
    UNROTATED,
    Made,
    Shape,
    block_tables,
    keys_there,
    sign_bits,
    slots,
    whole_shape,
)
from nvfp4_train.precision.kernels.four_over_six import MEASURES
from nvfp4_train.precision.kernels.launcher import launch
from nvfp4_train.precision.rounding import Key
from nvfp4_train.precision.shards import Shard, take_largest

TILE = 16
# By what was fastest on an H200 at 8192 x 2048 to 8192 x 20480; tests/benchmarks/results/gpu.md.
_AMAX = Shape(512, 4)
_VALUES = Shape(256, 2)
_REGISTERS = 128  # a thread; ptxas would take a few more, with fewer programs at once
_FLAT_AMAX = Shape(8192, 8)
_SQUARE_VALUES = Shape(512, 4)
_SQUARE_FOUR_OVER_SIX = Shape(128, 4)


def rows_and_columns(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, row_key: Key, column_key: Key, shard: Shard
) -> tuple[Made | None, Made | None]:
    """x in 1x16 blocks along its columns, and along its rows (as x^T); see `launch.quantize_rows_and_columns`."""
    height, width = x.shape
    amax, scales = slots(x, 2)
    signs = sign_bits(TILE) if columns is not None and columns.rotation else UNROTATED
    if columns is None:
        enter_amax(x, amax)
    else:
        numbers = height // TILE, width, rows is not None, True, signs, _AMAX.block
        launch(nvfp4.amax_kernel, (SLOTS, 1), (x, amax), numbers, num_warps=_AMAX.warps, **EXACT)
    take_largest(amax, shard)
    outs = [x if spec is None else torch.empty_like(x, dtype=torch.bfloat16) for spec in (rows, columns)]
    stochastic = [spec is not None and spec.rounding == "stochastic" for spec in (rows, columns)]
    launch(
        nvfp4.values_kernel,
        (triton.cdiv(width, _VALUES.block), height // TILE),
        (x, amax, *outs, scales, *block_tables(x, shard), *keys_there((row_key, column_key), stochastic, x)),
        (
            width, *whole_shape(x, shard), rows is not None, columns is not None, *stochastic,
            MEASURES[None if rows is None else rows.four_over_six], signs, shard.split, width % _VALUES.block == 0,
            *_VALUES,
        ),
        num_warps=_VALUES.warps, maxnreg=_REGISTERS, **EXACT,
    )  # fmt: skip
    made = [Made(out, scales[2 * i], scales[2 * i + 1]) for i, out in enumerate(outs)]
    return None if rows is None else made[0], None if columns is None else made[1]


def square(w: Tensor, spec: QuantSpec, shard: Shard) -> Made:
    """w in 16x16 tiles, which serve both contractions."""
    amax, scales = flat_amax(w, shard)
    out = torch.empty_like(w, dtype=torch.bfloat16)
    shape = _SQUARE_FOUR_OVER_SIX if spec.four_over_six else _SQUARE_VALUES
    grid = w.shape[0] // TILE, triton.cdiv(w.shape[1], shape.block)
    if spec.four_over_six:
        nvfp4.square_four_over_six_kernel[grid](
            w, amax, out, scales, w.shape[1], MEASURES[spec.four_over_six], shape.block, num_warps=shape.warps, **EXACT
        )
    else:
        nvfp4.square_values_kernel[grid](w, amax, out, scales, w.shape[1], shape.block, num_warps=shape.warps, **EXACT)
    return Made(out, scales[0], scales[1])


def flat_amax(x: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Amax slots of a contiguous tensor, filled, and room for its scale and amax."""
    amax, scales = slots(x, 1)
    enter_amax(x, amax)
    take_largest(amax, shard)
    return amax, scales


def enter_amax(x: Tensor, amax: Tensor) -> None:
    """Fill the first `SLOTS` slots with largest magnitudes of a contiguous tensor."""
    numbers = x.numel(), _FLAT_AMAX.block
    launch(nvfp4.flat_amax_kernel, (SLOTS, 1), (x, amax), numbers, num_warps=_FLAT_AMAX.warps, **EXACT)
