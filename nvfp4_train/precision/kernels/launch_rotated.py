"""Launches of rotated copies, and of Quartet II's corrected scales from them."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.kernels import eden, rotated
from nvfp4_train.precision.kernels.buffers import (
    EXACT,
    SLOTS,
    Made,
    Shape,
    block_tables,
    keys_there,
    sign_bits,
    whole_shape,
)
from nvfp4_train.precision.rounding import Key
from nvfp4_train.precision.shards import Shard, take_largest

_IN_REGISTERS = 64  # numbers that each thread of one warp holds while it rotates
_ALONG_ROWS = Shape(64, 4)
_ALONG_COLUMNS, _ROWS = Shape(256, 4), 4


def rotated_copy(x: Tensor, spec: QuantSpec, axis: int, sign_key: Key, decode: Tensor | None) -> tuple[Tensor, Tensor]:
    """Contiguous x [M, N], or FP32 x * decode, rotated along `axis` by whole groups, and slots of its amax.

    Returns:
        The copy, in x's dtype or FP32, and `SLOTS` bits of magnitudes, int32.
    """
    assert spec.rotation is not None
    lines, groups = x.shape[1 - axis], x.shape[axis] // spec.rotation
    amax = torch.zeros(SLOTS, dtype=torch.int32, device=x.device)
    out = torch.empty_like(x, dtype=x.dtype if decode is None else torch.float32)
    fresh = spec.signs == "fresh"
    (sign_key,) = keys_there([sign_key], [fresh], x)
    block = 32 * _IN_REGISTERS // spec.rotation
    rotated.rotate_kernel[(groups * triton.cdiv(lines, block),)](
        x, x if decode is None else decode, out, amax, sign_key, lines, groups, x.shape[1], axis,
        spec.rotation.bit_length() - 1, 1.0 / math.sqrt(spec.rotation),
        rotated.FRESH.value if fresh else sign_bits(16), decode is not None, lines % block != 0, block, num_warps=1,
        **EXACT,
    )  # fmt: skip
    return out, amax


def corrected(
    x: Tensor, spec: QuantSpec, axis: int, key: Key, sign_key: Key, shard: Shard, decode: Tensor | None
) -> Made:
    """x [M, N] rotated along `axis`, with corrected block scales; see `launch.quantize_operand`."""
    source, amax = rotated_copy(x, spec, axis, sign_key, decode)
    take_largest(amax, shard)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    scales = torch.empty(2, dtype=torch.float32, device=x.device)
    (key,) = keys_there([key], [True], x)
    height, width = x.shape
    whole = whole_shape(x, shard)[axis]
    common = source, amax, out, scales, *block_tables(x, shard), key, width, whole, shard.split
    if axis == 0:
        grid = height // 128, triton.cdiv(width, _ALONG_ROWS.block)
        eden.along_rows_kernel[grid](*common, _ALONG_ROWS.block, num_warps=_ALONG_ROWS.warps, **EXACT)
    else:
        grid = height // _ROWS, triton.cdiv(width, _ALONG_COLUMNS.block)
        eden.along_columns_kernel[grid](*common, _ROWS, _ALONG_COLUMNS.block, num_warps=_ALONG_COLUMNS.warps, **EXACT)
    return Made(out, scales[0], scales[1])
