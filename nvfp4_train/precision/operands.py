"""Operands of GEMMs, made by whatever makes them fastest.

`quantizer.quantize_values` is the definition. On a GPU kernels with the same bits stand in for it where they know the
spec, and make two operands of one tensor from one read: a linear's input is quantized along features and along tokens,
and so is the gradient of its output.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.quantizer import Values, quantize_values
from nvfp4_train.precision.shards import WHOLE, Shard


def quantize_operand(
    x: Tensor,
    spec: QuantSpec,
    *,
    key: int,
    axis: int,
    amax: Tensor | None,
    sign_key: int | None,
    block_scales: bool,
    shard: Shard = WHOLE,
) -> Values:
    """`quantize_values`; the kernels are passed by where `block_scales` are wanted, which they do not hand out."""
    if x.is_cuda and amax is None and not block_scales:
        launch = _launch()
        if launch.serves(x, spec, axis, shard):
            return Values(*launch.quantize_operand(x.contiguous(), spec, axis, key, shard))
    return quantize_values(x, spec, key=key, axis=axis, amax=amax, sign_key=sign_key, shard=shard)


def made_together(x: Tensor, rows: QuantSpec, columns: QuantSpec, shard: Shard = WHOLE) -> bool:
    """Whether `quantize_both` takes x with these specs."""
    if not x.is_cuda or any(spec.tile is not None and spec.tile[0] > 1 for spec in (rows, columns)):
        return False
    launch = _launch()
    return launch.serves(x, rows, 1, shard) and launch.serves(x, columns, 0, shard)


def quantize_both(
    x: Tensor, rows: QuantSpec, columns: QuantSpec, row_key: int, column_key: int, shard: Shard = WHOLE
) -> tuple[Values, Values]:
    """x [M, N] as an operand contracted over N and as one contracted over M, from one read.

    Args:
        rows, columns: of the two; `made_together`.
        row_key, column_key: their 64-bit keys of stochastic rounding.
        shard: which part of a matrix x is.
    """
    first, second = _launch().quantize_rows_and_columns(x.contiguous(), rows, columns, row_key, column_key, shard)
    return Values(*first), Values(*second)


def _launch() -> Any:
    """The kernels' launches; Triton is there where PyTorch has CUDA."""
    from nvfp4_train.precision.kernels import launch

    return launch
