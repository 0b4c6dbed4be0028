"""Operands of GEMMs, made by whatever makes them fastest.

`quantizer.quantize_values` is the definition. On a GPU kernels with the same bits stand in for it where they know the
spec, and make two operands of one tensor from one read: a linear's input is quantized along features and along tokens,
and so is the gradient of its output.

`native` operands are what FP8 tensor cores read: codes in place of values. Their rows lie along the contraction, in the
layout of x or transposed, with tokens filled up by zeros to a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from nvfp4_train.precision.assignment import LinearPrecision
from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.formats import FP8_FORMATS, layout_independent
from nvfp4_train.precision.quantizer import Values, quantize_values
from nvfp4_train.precision.rounding import Key
from nvfp4_train.precision.shards import WHOLE, Shard

# The dimension over which each GEMM contracts the tensor that an operand is made of.
AXES = {
    ("fprop", "input"): 1,
    ("fprop", "weight"): 1,
    ("dgrad", "gradient"): 1,
    ("dgrad", "weight"): 0,
    ("wgrad", "gradient"): 0,
    ("wgrad", "input"): 0,
}


def quantize_operand(
    x: Tensor,
    spec: QuantSpec,
    *,
    key: Key,
    axis: int,
    amax: Tensor | None,
    sign_key: Key | None,
    block_scales: bool,
    shard: Shard = WHOLE,
    native: bool = False,
    seen: Tensor | None = None,
    decode: Tensor | None = None,
) -> Values:
    """`quantize_values`; the kernels are passed by where `block_scales` are wanted, which they do not hand out.

    With `decode`, FP32 0-d, x are values of which FP32 x * decode is quantized. A native operand has no `amax`; with a
    delayed scale it is entered into `seen`, see `fp8_launch.quantize_codes`.
    """
    if native:
        rows, columns = (spec, None) if axis == 1 else (None, spec)
        return _values(_fp8_launch().quantize_codes(x.contiguous(), rows, columns, amax, seen, shard)[1 - axis], axis)
    wanted = not block_scales and (amax is None or spec.format == "fp8_delayed")
    kernel = wanted and has_kernel(x, spec, axis, shard)
    if decode is not None and not (kernel and _launch().decodes(spec)):
        x, decode = x.float() * decode, None
    if kernel:
        return Values(*_launch().quantize_operand(x.contiguous(), spec, axis, key, shard, amax, sign_key, decode))
    return quantize_values(x, spec, key=key, axis=axis, amax=amax, sign_key=sign_key, shard=shard)


def has_kernel(x: Tensor, spec: QuantSpec, axis: int, shard: Shard = WHOLE) -> bool:
    """Whether a kernel, not PyTorch's operations, quantizes x."""
    return x.is_cuda and bool(_launch().serves(x, spec, axis, shard))


def made_together(x: Tensor, rows: QuantSpec, columns: QuantSpec, shard: Shard = WHOLE, native: bool = False) -> bool:
    """Whether `quantize_both` takes x with these specs."""
    if native:
        return rows == columns and rows.format in FP8_FORMATS
    if not has_kernel(x, rows, 1, shard) or not has_kernel(x, columns, 0, shard):
        return False
    return bool(_launch().made_together(rows, columns))


def without_kernel(assignments: Iterable[LinearPrecision], tokens: int) -> list[str]:
    """For a run on a GPU, a line about each kind of operand that PyTorch's operations must quantize.

    Args:
        assignments: of the run's linears.
        tokens: of a micro-batch on this rank, the rows of inputs and gradients.
    """
    launch, found = _launch(), dict[str, dict[str, None]]()
    for assignment in assignments:
        for gemm_name, kinds in assignment.operands.items():
            for kind, spec in kinds.items():
                if spec.format == "bf16":
                    continue
                # Of a weight with one copy for both GEMMs, the forward pass makes it.
                shared = layout_independent(spec) and spec == assignment.operands["fprop"].get(kind)
                axis = 1 if shared else AXES[gemm_name, kind]
                multiple = launch.multiples(spec, axis)[0]
                if not launch.known(spec, axis):
                    what = f"this {spec.format}"
                elif kind != "weight" and tokens % multiple:
                    what = f"{spec.format}, {tokens} tokens a micro-batch being no multiple of {multiple}"
                else:
                    continue
                found.setdefault(what, {})[f"{gemm_name} {kind}"] = None
    return [
        f"no kernel quantizes {', '.join(names)} to {what}: PyTorch's own operations do, same bits, slower"
        for what, names in found.items()
    ]


def quantize_both(
    x: Tensor,
    rows: QuantSpec,
    columns: QuantSpec,
    row_key: Key = 0,
    column_key: Key = 0,
    shard: Shard = WHOLE,
    *,
    amax: Tensor | None = None,
    seen: Tensor | None = None,
    native: bool = False,
) -> tuple[Values, Values]:
    """x [M, N] as an operand contracted over N and as one contracted over M, from one read where a kernel can.

    Args:
        rows, columns: of the two; `made_together`.
        row_key, column_key: their 64-bit keys of stochastic rounding.
        shard: which part of a matrix x is.
        amax: what a delayed scale follows.
        seen: where a native operand's own amax is entered then.
    """
    if native:
        made = _fp8_launch().quantize_codes(x.contiguous(), rows, columns, amax, seen, shard)
        return _values(made[0], 1), _values(made[1], 0)
    first, second = _launch().quantize_rows_and_columns(x.contiguous(), rows, columns, row_key, column_key, shard)
    return Values(*first), Values(*second)


def _values(codes: Any, axis: int) -> Values:
    return Values(codes.values, codes.scale, None, axis=axis)


def _launch() -> Any:
    """The kernels' launches; Triton is there where PyTorch has CUDA."""
    from nvfp4_train.precision.kernels import launch

    return launch


def _fp8_launch() -> Any:
    from nvfp4_train.precision.kernels import fp8_launch

    return fp8_launch
