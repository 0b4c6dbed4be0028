"""Whether a linear's widths fit the blocks of its operands, per rank. No torch here.

A GEMM is quantized in blocks along its contraction: fprop over in-features, dgrad over out-features, wgrad over
tokens. A width that ends in a fraction of a block would need padding in every GEMM that contracts it, which tensor
cores do not do; the linear stays in BF16 and says why. What counts is the width that a tensor-parallel rank holds.
Tokens are no property of a linear: the batch sizes decide, and the quantizers pad them with zeros.

The blocks of fp8_block are longer than what tensor cores contract at a time, and the last of a matrix may be partial.
A rank's share of a width has to be whole blocks nevertheless, or blocks would lie elsewhere than in one process.
"""

from __future__ import annotations

from typing import Protocol

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.formats import FORMATS
from nvfp4_train.precision.recipes import Gemms

# FP8 tensor cores take contractions in multiples of 16 bytes.
TENSOR_CORE_MULTIPLE = 16
# Words that every reason about a width has.
MISFIT = "is no multiple of"
# Megatron's column-parallel linears share out-features among tensor-parallel ranks, the row-parallel ones in-features.
ROW_PARALLEL_ROLES = ("out_proj", "proj", "fc2")

_HIDDEN, _FFN = "model.hidden_size", "model.ffn_hidden_size"
_INNER = "d_inner = model.mamba_num_heads * model.mamba_head_dim"
_QUERIES = "model.num_attention_heads * model.head_dim"
# What the model's configuration calls a linear's in-features and out-features.
WIDTH_NAMES = {
    "in_proj": (_HIDDEN, "2 * d_inner + 2 * groups * state + heads"),
    "out_proj": (_INNER, _HIDDEN),
    "qkv": (_HIDDEN, "(model.num_attention_heads + 2 * model.num_query_groups) * model.head_dim"),
    "proj": (_QUERIES, _HIDDEN),
    "fc1": (_HIDDEN, _FFN),
    "fc2": (_FFN, _HIDDEN),
    "output": (_HIDDEN, "the padded vocabulary"),
}


class LinearShape(Protocol):
    """A linear of the unsharded model, as the model room describes it."""

    @property
    def name(self) -> str: ...
    @property
    def block(self) -> int | None: ...
    @property
    def letter(self) -> str | None: ...
    @property
    def role(self) -> str: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...


def contraction_multiple(spec: QuantSpec, shared: bool) -> int:
    """What the contracted width of an operand must be a multiple of; `shared` among ranks or not."""
    if spec.format == "bf16":
        return 1
    block = FORMATS[spec.format].block or TENSOR_CORE_MULTIPLE
    if spec.format == "fp8_block" and not shared:
        block = TENSOR_CORE_MULTIPLE
    return max(block, spec.rotation or 1)


def row_multiple(spec: QuantSpec, shared: bool) -> int:
    """What an operand's other width must be a multiple of: the rows of its tile."""
    return contraction_multiple(spec, shared) if spec.tile and spec.tile[0] > 1 else 1


def needed_multiples(gemms: Gemms, split: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """What in-features and out-features of a linear must be multiples of, per rank: powers of two, the largest decides.

    Args:
        split: ranks that share each of the two.
    """
    fprop, dgrad, wgrad = gemms
    into, out = (ranks > 1 for ranks in split)
    return (
        max(
            *(contraction_multiple(spec, into) for spec in (fprop.input, fprop.weight)),
            *(row_multiple(spec, into) for spec in (dgrad.weight, wgrad.input)),
        ),
        max(
            *(contraction_multiple(spec, out) for spec in (dgrad.gradient, dgrad.weight)),
            *(row_multiple(spec, out) for spec in (fprop.weight, wgrad.gradient)),
        ),
    )


def misfit(shape: LinearShape, gemms: Gemms, tensor: int) -> str:
    """Why a linear cannot be quantized so at `tensor` tensor-parallel ranks: field, value, value per rank, needed
    multiple, and the two nearest legal values. Empty where it fits."""
    names = WIDTH_NAMES.get(shape.role, ("in-features", "out-features"))
    split_in = tensor if shape.role in ROW_PARALLEL_ROLES else 1
    split_out = tensor // split_in
    into, out = needed_multiples(gemms, (split_in, split_out))
    problems = (
        _width_problem(names[0], shape.in_features, into, split_in),
        _width_problem(names[1], shape.out_features, out, split_out),
    )
    return "; ".join(problem for problem in problems if problem)


def _width_problem(name: str, width: int, multiple: int, ranks: int) -> str:
    step = multiple * ranks
    if width % step == 0:
        return ""
    below = width // step * step
    nearest = f"{below} and {below + step}" if below else f"{step} and {2 * step}"
    local = f", {width / ranks:g} per rank at parallel.tensor={ranks}," if ranks > 1 else ""
    return f"{name} = {width}{local} {MISFIT} {multiple} (nearest {nearest})"
