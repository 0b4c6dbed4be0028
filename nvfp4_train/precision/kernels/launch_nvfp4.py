"""Launches of NVFP4, four over six among it: a pass for the amaxes, then a pass for the values."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.kernels import four_over_six, nvfp4
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
from nvfp4_train.precision.kernels.launcher import launch
from nvfp4_train.precision.rounding import Key
from nvfp4_train.precision.shards import Shard, take_largest

TILE = 16
# By what was fastest on an H200 at 8192 x 2048 to 8192 x 20480; tests/benchmarks/results/gpu.md.
_AMAX = Shape(512, 4)
_VALUES = Shape(256, 2)
_FLAT_AMAX = Shape(8192, 8)
_SQUARE_VALUES = Shape(512, 4)
_FOUR_OVER_SIX = Shape(512, 4)
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
        nvfp4.amax_kernel[(SLOTS,)](
            x, amax, height // TILE, width, rows is not None, True, signs, _AMAX.block, num_warps=_AMAX.warps, **EXACT
        )
    take_largest(amax, shard)
    outs = [x if spec is None else torch.empty_like(x, dtype=torch.bfloat16) for spec in (rows, columns)]
    plain = rows if rows is not None and not rows.four_over_six else None
    if plain or columns:
        stochastic = [spec is not None and spec.rounding == "stochastic" for spec in (plain, columns)]
        nvfp4.values_kernel[(height // TILE, triton.cdiv(width, _VALUES.block))](
            x, amax, *outs, scales, *block_tables(x, shard), width, *whole_shape(x, shard),
            *keys_there((row_key, column_key), stochastic, x), plain is not None, columns is not None, *stochastic,
            signs, shard.split, _VALUES.block, num_warps=_VALUES.warps, **EXACT,
        )  # fmt: skip
    if rows is not None and rows.four_over_six:
        _four_over_six(x, rows, amax, outs[0], scales)
    made = [Made(out, scales[2 * i], scales[2 * i + 1]) for i, out in enumerate(outs)]
    return None if rows is None else made[0], None if columns is None else made[1]


def square(w: Tensor, spec: QuantSpec, shard: Shard) -> Made:
    """w in 16x16 tiles, which serve both contractions."""
    amax, scales = flat_amax(w, shard)
    out = torch.empty_like(w, dtype=torch.bfloat16)
    if spec.four_over_six:
        _four_over_six(w, spec, amax, out, scales)
    else:
        grid = (w.shape[0] // TILE, triton.cdiv(w.shape[1], _SQUARE_VALUES.block))
        nvfp4.square_values_kernel[grid](
            w, amax, out, scales, w.shape[1], _SQUARE_VALUES.block, num_warps=_SQUARE_VALUES.warps, **EXACT
        )
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


def _four_over_six(x: Tensor, spec: QuantSpec, amax: Tensor, out: Tensor, scales: Tensor) -> None:
    tiles = spec.tile == (TILE, TILE)
    shape, together = (_SQUARE_FOUR_OVER_SIX, TILE) if tiles else (_FOUR_OVER_SIX, 4)
    four_over_six.four_over_six_kernel[(x.shape[0] // TILE, triton.cdiv(x.shape[1], shape.block))](
        x, amax, out, scales, x.shape[1], spec.four_over_six == "mae", tiles, together, shape.block,
        num_warps=shape.warps, **EXACT,
    )  # fmt: skip
