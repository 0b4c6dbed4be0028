"""Which operands the kernels serve, and their launches.

`known` says whether there are kernels for a spec, `serves` whether they take a tensor; a caller then uses them and
never falls back from them. Nothing here waits for the GPU: scales and amaxes stay in its memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.formats import FORMATS
from nvfp4_train.precision.kernels import launch_blocks, launch_nvfp4
from nvfp4_train.precision.kernels.buffers import CALL, Made
from nvfp4_train.precision.rounding import Key
from nvfp4_train.precision.shards import WHOLE, Shard

# The rotation that a format's kernels know, along the rows of x.
_ROTATIONS = {"nvfp4": 16, "mxfp4": 32}
_TENSOR_FORMATS = ("fp8_current", "fp8_delayed")


def known(spec: QuantSpec, axis: int) -> bool:
    """Whether there are kernels for operands contracted over `axis` by this spec.

    There are none for row scaling, for Quartet II's corrected scales, for other rotations than the recipes' own (fixed
    signs, 16 of nvfp4 and 32 of mxfp4), and for four over six along the rows of x.
    """
    if spec.format == "bf16" or spec.scaling == "row" or spec.correction:
        return False
    if spec.rotation:
        return axis == 0 and spec.rotation == _ROTATIONS.get(spec.format) and spec.signs == "fixed"
    if spec.four_over_six:
        return axis == 1
    return not (_square(spec) and spec.rounding == "stochastic")


def multiple(spec: QuantSpec) -> int:
    """What both sizes of a matrix must be multiples of: whole blocks, but where the kernels know partial ones."""
    return 1 if spec.format == "fp8_block" else FORMATS[spec.format].block or 1


def serves(x: Tensor, spec: QuantSpec, axis: int, shard: Shard = WHOLE) -> bool:
    """Whether the kernels quantize contiguous x [M, N] by this spec, contracted over `axis`.

    With stochastic rounding, a part of a matrix must be made of whole blocks of the whole.
    """
    if not known(spec, axis) or x.numel() == 0 or any(size % multiple(spec) for size in x.shape):
        return False
    return spec.rounding == "nearest" or all(extent is None or extent.aligned(CALL) for extent in shard)


def made_together(rows: QuantSpec, columns: QuantSpec) -> bool:
    """Whether one read gives operands by both specs, which the kernels know."""
    return rows.format == columns.format and not _square(rows) and not _square(columns) and _blocks(rows)


def quantize_operand(
    x: Tensor, spec: QuantSpec, axis: int, key: Key, shard: Shard = WHOLE, amax: Tensor | None = None
) -> Made:
    """Quantize contiguous x [M, N], contracted over `axis`, by a spec that the kernels serve.

    Args:
        x: BF16 or FP32 on a GPU.
        spec, axis: how; `serves`.
        key: 64-bit key of stochastic rounding; best on the GPU already.
        shard: which part of a matrix x is; see `quantizer.quantize_values`.
        amax: what the tensor scale of fp8_delayed follows, FP32 0-d; None for a scale of 1.
    """
    if spec.format in _TENSOR_FORMATS:
        if spec.format == "fp8_delayed" and amax is None:
            amax = x.new_zeros((), dtype=torch.float32)
        return launch_blocks.fp8_tensor(x, spec, amax, shard)
    if _square(spec):
        return quantize_square(x, spec, shard)
    rows, columns = (spec, None) if axis == 1 else (None, spec)
    made = quantize_rows_and_columns(x, rows, columns, key, key, shard)[1 - axis]
    assert made is not None
    return made


def quantize_rows_and_columns(
    x: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_key: Key = 0,
    column_key: Key = 0,
    shard: Shard = WHOLE,
) -> tuple[Made | None, Made | None]:
    """Quantize contiguous x [M, N] in row blocks along its columns, along its rows (as x^T), or both from one read.

    Args:
        x: BF16 or FP32 on a GPU; M and N multiples of `multiple`.
        rows: spec of the operand contracted over N, or None.
        columns: spec of the operand x^T contracted over M, or None; it is kept in the layout of x.
        row_key, column_key: 64-bit keys of stochastic rounding.
        shard: which part of a matrix x is; see `quantizer.quantize_values`.
    """
    one = rows or columns
    assert one is not None
    if one.format == "nvfp4":
        return launch_nvfp4.rows_and_columns(x, rows, columns, row_key, column_key, shard)
    if one.format == "fp8_block":
        return launch_blocks.fp8_rows_and_columns(x, rows, columns)
    return launch_blocks.mx_rows_and_columns(x, rows, columns, row_key, column_key, shard)


def quantize_square(w: Tensor, spec: QuantSpec, shard: Shard = WHOLE) -> Made:
    """Quantize contiguous w [M, N], FP32 or BF16, in square tiles, which serve both contractions."""
    if spec.format == "nvfp4":
        return launch_nvfp4.square(w, spec, shard)
    if spec.format == "fp8_block":
        return launch_blocks.fp8_square(w, spec)
    return launch_blocks.mx_square(w, spec)


def _square(spec: QuantSpec) -> bool:
    return spec.tile is not None and spec.tile[0] > 1


def _blocks(spec: QuantSpec) -> bool:
    return FORMATS[spec.format].block is not None
