"""Which kernels serve which operands, and their launches.

`serves` says whether the kernels know a spec; a caller then uses them and never falls back from them.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.kernels import nvfp4
from nvfp4_train.precision.rotation import FIXED_SIGNS

# Bit i is set where the published sign i is -1; -1 stands for no rotation.
_SIGNS = sum(1 << i for i, sign in enumerate(FIXED_SIGNS) if sign < 0)
_UNROTATED = -1
_TILE = 16
# A product and a sum fused into one operation would round once where the reference rounds twice.
_EXACT = {"enable_fp_fusion": False}


def serves(spec: QuantSpec, axis: int) -> bool:
    """Whether the kernels quantize operands of this spec that are contracted over `axis`."""
    plain = spec.format == "nvfp4" and spec.scaling == "tensor" and not spec.four_over_six and not spec.correction
    if spec.tile == (_TILE, _TILE):
        return plain and spec.rounding == "nearest" and spec.rotation is None
    rotation = spec.rotation is None or (axis == 0 and spec.rotation == 16 and spec.signs == "fixed")
    return plain and rotation


def quantize_rows_and_columns(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, row_key: int = 0, column_key: int = 0
) -> tuple[tuple[Tensor, Tensor, Tensor] | None, tuple[Tensor, Tensor, Tensor] | None]:
    """Quantize contiguous x [M, N] in 1x16 blocks along its columns, along its rows (as x^T), or both from one read.

    Args:
        x: BF16 or FP32 on a GPU; N a multiple of 16; M is padded with zeros where `columns` needs it.
        rows: spec of the operand contracted over N, or None.
        columns: spec of the operand x^T contracted over M, or None; kept in the layout of x.
        row_key, column_key: 64-bit keys of stochastic rounding.

    Returns:
        For each: values BF16, s_dec FP32 0-d, amax FP32 0-d; or None.
    """
    missing = -x.shape[0] % _TILE
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    height, width = x.shape
    assert width % _TILE == 0, width
    amax = torch.zeros(2, dtype=torch.int32, device=x.device)
    scales = torch.empty(2, dtype=torch.float32, device=x.device)
    signs = _SIGNS if columns is not None and columns.rotation else _UNROTATED
    block = min(512, triton.next_power_of_2(width))
    grid = (height // _TILE, triton.cdiv(width, block))
    nvfp4.amax_kernel[grid](
        x, amax, width, width, rows is not None, columns is not None, signs, block, num_warps=4, **_EXACT
    )
    outs = [torch.empty(height, width, dtype=torch.bfloat16, device=x.device) if spec else x for spec in (rows, columns)]
    block = min(1024 if rows is not None else 512, triton.next_power_of_2(width))
    grid = (height // _TILE, triton.cdiv(width, block))
    nvfp4.values_kernel[grid](
        x,
        amax,
        outs[0],
        outs[1],
        scales,
        height - (missing if columns is None or columns.rotation is None else 0),
        width,
        _signed(row_key),
        _signed(column_key),
        rows is not None,
        columns is not None,
        rows is not None and rows.rounding == "stochastic",
        columns is not None and columns.rounding == "stochastic",
        signs,
        block,
        num_warps=8 if rows is not None and columns is not None else 4,
        **_EXACT,
    )
    return None, None


def _signed(key: int) -> int:
    """The same 64 bits as a signed number, so that every key gives the kernel the same type."""
    return key - (1 << 64) if key >> 63 else key
