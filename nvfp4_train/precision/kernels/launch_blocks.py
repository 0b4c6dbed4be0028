"""Launches of the formats that need one pass (blocks without a tensor scale), and of FP8 with one scale a tensor."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.formats import element_of
from nvfp4_train.precision.kernels import fp8_values, mx
from nvfp4_train.precision.kernels.buffers import (
    EXACT,
    UNROTATED,
    Made,
    Shape,
    block_tables,
    keys_there,
    sign_bits,
    whole_shape,
)
from nvfp4_train.precision.kernels.launch_nvfp4 import flat_amax
from nvfp4_train.precision.kernels.launcher import launch
from nvfp4_train.precision.rounding import Key
from nvfp4_train.precision.shards import Shard

MX_TILE, FP8_TILE = mx.SIZE.value, fp8_values.TILE.value
_MANTISSA = {"e2m1": 1, "e5m2": 2, "e4m3": 3}
_MX = Shape(128, 2)
_FLAT = Shape(4096, 4)
_FP8_WARPS = 16


def mx_rows_and_columns(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, row_key: Key, column_key: Key, shard: Shard
) -> tuple[Made | None, Made | None]:
    """x in 1x32 blocks along its columns, and along its rows (as x^T); see `launch.quantize_rows_and_columns`."""
    specs = rows, columns
    outs = [x if spec is None else torch.empty_like(x, dtype=torch.bfloat16) for spec in specs]
    stochastic = [spec is not None and spec.rounding == "stochastic" for spec in specs]
    up = [spec is None or spec.scale_rounding == "up" for spec in specs]
    signs = sign_bits(MX_TILE) if columns is not None and columns.rotation else UNROTATED
    mantissa = _MANTISSA[element_of(next(spec for spec in specs if spec is not None))]
    launch(
        mx.mx_kernel,
        (triton.cdiv(x.shape[1], _MX.block), x.shape[0] // MX_TILE),
        (x, *outs, *block_tables(x, shard), *keys_there((row_key, column_key), stochastic, x)),
        (
            x.shape[1], *whole_shape(x, shard), rows is not None, columns is not None, *stochastic, signs,
            shard.split, mantissa, *up, x.shape[1] % _MX.block == 0, _MX.block,
        ),
        num_warps=_MX.warps, **EXACT,
    )  # fmt: skip
    first, second = (None if spec is None else Made(out, None, None) for spec, out in zip(specs, outs, strict=True))
    return first, second


def mx_square(w: Tensor, spec: QuantSpec) -> Made:
    """w in 32x32 tiles, which serve both contractions."""
    out = torch.empty_like(w, dtype=torch.bfloat16)
    mx.mx_square_kernel[(w.shape[0] // MX_TILE, triton.cdiv(w.shape[1], _MX.block))](
        w, out, w.shape[1], _MANTISSA[element_of(spec)], spec.scale_rounding == "up", _MX.block,
        num_warps=_MX.warps, **EXACT,
    )  # fmt: skip
    return Made(out, None, None)


def fp8_rows_and_columns(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None
) -> tuple[Made | None, Made | None]:
    """x in 1x128 blocks along its columns, and along its rows (as x^T); values FP32."""
    outs = [x if spec is None else torch.empty_like(x, dtype=torch.float32) for spec in (rows, columns)]
    powers = [spec is not None and spec.power_of_two for spec in (rows, columns)]
    fp8_values.block_values_kernel[_fp8_grid(x)](
        x, *outs, *x.shape, rows is not None, columns is not None, *powers, num_warps=fp8_values.WARPS.value, **EXACT
    )
    return (
        None if rows is None else Made(outs[0], None, None),
        None if columns is None else Made(outs[1], None, None),
    )


def fp8_square(w: Tensor, spec: QuantSpec) -> Made:
    """w in 128x128 tiles, which serve both contractions; values FP32."""
    out = torch.empty_like(w, dtype=torch.float32)
    fp8_values.square_block_values_kernel[_fp8_grid(w)](
        w, out, *w.shape, spec.power_of_two, num_warps=_FP8_WARPS, **EXACT
    )
    return Made(out, None, None)


def fp8_tensor(x: Tensor, spec: QuantSpec, amax: Tensor | None, shard: Shard) -> Made:
    """x with one scale, which follows its own amax or the `amax` given; serves both contractions."""
    found, scales = flat_amax(x, shard)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    fp8_values.tensor_values_kernel[(triton.cdiv(x.numel(), _FLAT.block),)](
        x, found, found if amax is None else amax, out, scales, x.numel(), amax is not None,
        _MANTISSA[element_of(spec)], _FLAT.block, num_warps=_FLAT.warps, **EXACT,
    )  # fmt: skip
    return Made(out, scales[0], scales[1])


def _fp8_grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], FP8_TILE), triton.cdiv(x.shape[1], FP8_TILE)
