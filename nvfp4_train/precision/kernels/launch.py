"""Which operands the kernels serve, and their launches.

`known` says whether there are kernels for a spec, `serves` whether they take a tensor; a caller then uses them and
never falls back from them. Nothing here waits for the GPU: scales and amaxes stay in its memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.formats import FORMATS
from nvfp4_train.precision.kernels import launch_blocks, launch_nvfp4, launch_rotated, launch_rows
from nvfp4_train.precision.kernels.buffers import CALL, Made
from nvfp4_train.precision.rounding import Key
from nvfp4_train.precision.shards import WHOLE, Shard

# The rotation along the rows of x that a format's kernels make as they read.
_ROTATIONS = {"nvfp4": 16, "mxfp4": 32}
_TENSOR_FORMATS = ("fp8_current", "fp8_delayed")
# A grid's second dimension counts groups of 16 rows, and CUDA no further than this.
_MOST_ROWS = 16 * 65535


def known(spec: QuantSpec, axis: int) -> bool:
    """Whether there are kernels for operands contracted over `axis` by this spec.

    There are none for four over six and row scaling along the rows of x, and none for blocks of E4M3 on a card that
    does not convert to it.
    """
    if spec.format == "bf16" or (spec.format == "fp8_block" and not _converts_to_e4m3()):
        return False
    if spec.rotation:
        return bool(spec.correction) or known(_unrotated(spec), axis)
    if spec.scaling == "row":
        return axis == 1 and spec.rounding == "nearest"
    if spec.four_over_six:
        return axis == 1 or _square(spec)
    return not (_square(spec) and spec.rounding == "stochastic")


@cache
def _converts_to_e4m3() -> bool:
    """Whether the card at hand has the instruction, as from Ada on. Without a card: the interpreter does."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def multiples(spec: QuantSpec, axis: int) -> tuple[int, int]:
    """What the rows and columns of a matrix must be multiples of: whole blocks, and whole groups of a rotation along
    `axis`; 1 where the kernels know partial ones.
    """
    block = 1 if spec.format == "fp8_block" else FORMATS[spec.format].block or 1
    along = max(block, spec.rotation or 1)
    return (along, block) if axis == 0 else (block, along)


def serves(x: Tensor, spec: QuantSpec, axis: int, shard: Shard = WHOLE) -> bool:
    """Whether the kernels quantize contiguous x [M, N] by this spec, contracted over `axis`.

    With random bits, a part of a matrix must be made of whole blocks of the whole, which for corrected scales are
    groups along `axis`.
    """
    sizes = zip(x.shape, multiples(spec, axis), strict=True)
    if x.numel() == 0 or x.shape[0] > _MOST_ROWS:
        return False
    if not known(spec, axis) or any(size % multiple for size, multiple in sizes):
        return False
    if spec.rounding == "nearest" and not spec.correction:
        return True
    wanted = [CALL, CALL]
    if spec.correction:
        wanted[axis] = spec.rotation or CALL
    return all(extent is None or extent.aligned(size) for extent, size in zip(shard, wanted, strict=True))


def made_together(rows: QuantSpec, columns: QuantSpec) -> bool:
    """Whether one read gives operands by both specs, which the kernels know."""
    if rows.rotation or (columns.rotation and not _rotates_as_it_reads(columns, 0)):
        return False
    alone = any(spec.scaling == "row" or _square(spec) for spec in (rows, columns))
    return rows.format == columns.format and not alone and _blocks(rows)


def quantize_operand(
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    key: Key,
    shard: Shard = WHOLE,
    amax: Tensor | None = None,
    sign_key: Key | None = None,
    decode: Tensor | None = None,
) -> Made:
    """Quantize contiguous x [M, N], contracted over `axis`, by a spec that the kernels serve.

    Args:
        x: BF16 or FP32 on a GPU.
        spec, axis: how; `serves`.
        key: 64-bit key of random bits; best on the GPU already.
        shard: which part of a matrix x is; see `quantizer.quantize_values`.
        amax: what the tensor scale of fp8_delayed follows, FP32 0-d; None for a scale of 1.
        sign_key: 64-bit key of fresh signs; None means `key`.
        decode: x times this, FP32 0-d, is quantized, as an FP32 tensor; for specs that `decodes` names alone.
    """
    sign_key = key if sign_key is None else sign_key
    if spec.correction:
        return launch_rotated.corrected(x, spec, axis, key, sign_key, shard, decode)
    assert decode is None
    if spec.rotation and not _rotates_as_it_reads(spec, axis):
        x, _ = launch_rotated.rotated_copy(x, spec, axis, sign_key, None)
        spec = _unrotated(spec)
    if spec.scaling == "row":
        return launch_rows.row_scaled_rows(x, spec, shard)
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


def decodes(spec: QuantSpec) -> bool:
    """Whether the kernels multiply x by a tensor scale as they read it."""
    return spec.correction is not None


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


def _rotates_as_it_reads(spec: QuantSpec, axis: int) -> bool:
    """Whether the kernel that quantizes rotates too, with no copy between."""
    return axis == 0 and spec.rotation == _ROTATIONS.get(spec.format) and spec.signs == "fixed" and not spec.correction


def _unrotated(spec: QuantSpec) -> QuantSpec:
    """How the rotated copy is quantized."""
    return replace(spec, rotation=None, signs="fixed")


def _square(spec: QuantSpec) -> bool:
    return spec.tile is not None and spec.tile[0] > 1


def _blocks(spec: QuantSpec) -> bool:
    return FORMATS[spec.format].block is not None
