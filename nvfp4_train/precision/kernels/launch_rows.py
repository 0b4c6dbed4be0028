"""Launches of NVFP4 with a tensor scale for each row."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.kernels import row_scaled
from nvfp4_train.precision.kernels.buffers import EXACT, Made, Shape
from nvfp4_train.precision.kernels.four_over_six import MEASURES
from nvfp4_train.precision.shards import Shard, take_largest

_AMAX = Shape(512, 4)
_VALUES = Shape(512, 4)


def row_scaled_rows(x: Tensor, spec: QuantSpec, shard: Shard) -> Made:
    """x [M, N] in 1x16 blocks along its columns, with a scale and an amax for each of its rows, FP32 [M]."""
    height, width = x.shape
    amax = torch.empty(height, dtype=torch.int32, device=x.device)
    scales = torch.empty(height, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    groups = height // row_scaled.ROWS.value
    row_scaled.row_amax_kernel[(groups,)](x, amax, width, _AMAX.block, num_warps=_AMAX.warps, **EXACT)
    take_largest(amax, [shard.columns])
    row_scaled.row_scaled_kernel[(groups, triton.cdiv(width, _VALUES.block))](
        x, amax, out, scales, width, MEASURES[spec.four_over_six], _VALUES.block,
        num_warps=_VALUES.warps, **EXACT,
    )  # fmt: skip
    return Made(out, scales, amax.view(torch.float32))
