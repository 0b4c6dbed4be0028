"""The table of formats, and the check that a quantizer makes sense. No torch here: configurations read it.

A format is an element type (how many bits one number keeps) and a way of sharing scales:

    name         element      block      block scale           tensor scale
    nvfp4        E2M1         16         E4M3                  FP32, from the tensor's amax
    mxfp4        E2M1         32         E8M0 (power of two)   none
    mxfp8        E4M3         32         E8M0                  none
    fp8_block    E4M3         128        FP32                  none
    fp8_current  E4M3, E5M2   none       none                  FP32, from this tensor's amax
    fp8_delayed  E4M3, E5M2   none       none                  FP32, from an amax history
    bf16         BF16         none       none                  none

A block is `1 x size` along the contraction of the GEMM, or a square `size x size` tile. A square tile has the same
scale whether it is read by rows or by columns, which is why weights use it: the forward and the backward GEMM then see
one quantized weight.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

ROTATIONS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Format:
    """What a format fixes.

    Attributes:
        block: elements that share one scale, None for whole-tensor formats.
        elements: element types it may use, its own first.
    """

    block: int | None
    elements: tuple[str, ...]


FORMATS = {
    "bf16": Format(None, ("bf16",)),
    "nvfp4": Format(16, ("e2m1",)),
    "mxfp4": Format(32, ("e2m1",)),
    "mxfp8": Format(32, ("e4m3",)),
    "fp8_block": Format(128, ("e4m3",)),
    "fp8_current": Format(None, ("e4m3", "e5m2")),
    "fp8_delayed": Format(None, ("e4m3", "e5m2")),
}

# Formats of eight bits whose scales are FP32: what FP8 tensor cores multiply without Transformer Engine.
FP8_FORMATS = ("fp8_block", "fp8_current", "fp8_delayed")

# Largest finite magnitude of each element type.
ELEMENT_MAX = {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0}


def element_of(spec: Any) -> str:
    """Element type of a `QuantSpec`: the one it names, else its format's own."""
    return spec.element or FORMATS[spec.format].elements[0]


def natural_tile(format_name: str) -> tuple[int, int] | None:
    """The row tile of a format, for example (1, 16) of nvfp4; None for whole-tensor formats."""
    block = FORMATS[format_name].block
    return None if block is None else (1, block)


def layout_independent(spec: Any) -> bool:
    """Whether quantizing x^T by a `QuantSpec` gives the transpose of quantizing x: one copy then serves two GEMMs."""
    exact = (
        spec.rounding == "nearest" and spec.rotation is None and spec.scaling == "tensor" and spec.correction is None
    )
    whole = spec.format in ("bf16", "fp8_current", "fp8_delayed")
    return exact and (whole or (spec.tile is not None and spec.tile[0] == spec.tile[1]))


def unknown_name(kind: str, value: object, known: tuple[str, ...]) -> str:
    """Message about a name that is none of `known`, with the nearest one."""
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{kind} {value!r} is unknown.{hint} Use one of: {', '.join(known)}."


def find_problem(spec: Any) -> str | None:
    """Say what is wrong with a `QuantSpec` (what, why, what to write instead), or None where it makes sense."""
    choices: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("format", tuple(FORMATS)),
        ("rounding", ("nearest", "stochastic")),
        ("scaling", ("tensor", "row")),
        ("signs", ("fixed", "fresh")),
        ("scale_rounding", ("up", "ocp")),
    )
    for field, known in choices:
        if getattr(spec, field) not in known:
            return unknown_name(field, getattr(spec, field), known)
    if spec.four_over_six not in (None, "mse", "mae"):
        return unknown_name("four_over_six", spec.four_over_six, ("mse", "mae"))
    if spec.correction not in (None, "eden"):
        return unknown_name("correction", spec.correction, ("eden",))
    return _element_problem(spec) or _tile_problem(spec) or _rotation_problem(spec) or _option_problem(spec)


def _element_problem(spec: Any) -> str | None:
    allowed = FORMATS[spec.format].elements
    if spec.element is None or spec.element in allowed:
        return None
    if spec.element not in (*ELEMENT_MAX, "bf16"):
        return unknown_name("element", spec.element, tuple(ELEMENT_MAX))
    why = "its gradients lose quality in E5M2" if spec.element == "e5m2" else "no kernel or recipe pairs the two"
    return f"element {spec.element!r} cannot be used in {spec.format}: {why}. Use {' or '.join(allowed)}."


def _tile_problem(spec: Any) -> str | None:
    block = FORMATS[spec.format].block
    if spec.tile is None:
        return None
    if block is None:
        return (
            f"tile {list(spec.tile)} makes no sense for {spec.format}, which has one scale for the whole tensor, or "
            "none. Leave tile out."
        )
    if spec.tile not in ((1, block), (block, block)):
        return (
            f"tile {list(spec.tile)} does not fit {spec.format}, whose blocks hold {block} elements. "
            f"Use [1, {block}] (rows) or [{block}, {block}] (square)."
        )
    return None


def _rotation_problem(spec: Any) -> str | None:
    if spec.rotation is None:
        if spec.signs == "fresh":
            return "signs 'fresh' belong to a rotation, and rotation is None. Set rotation, or leave signs out."
        return None
    if spec.rotation not in ROTATIONS:
        return f"rotation {spec.rotation!r} is not offered. Use null or one of {', '.join(map(str, ROTATIONS))}."
    if element_of(spec) != "e2m1":
        return (
            f"rotation {spec.rotation} makes no sense for {spec.format}: it spreads outliers for 4-bit elements. "
            "Use nvfp4 or mxfp4, or rotation null."
        )
    if spec.tile is not None and spec.tile[0] > 1:
        return (
            f"rotation {spec.rotation} with the square tile {list(spec.tile)}: a rotated copy is used along one "
            "direction only, so a square tile would only cost accuracy. "
            f"Use tile [1, {spec.tile[1]}], or rotation null."
        )
    return None


def _option_problem(spec: Any) -> str | None:
    what = spec.format if spec.tile is None else f"{spec.format} with tile {list(spec.tile)}"
    if spec.rounding == "stochastic" and element_of(spec) != "e2m1":
        return f"rounding 'stochastic' is for 4-bit elements (nvfp4, mxfp4), not for {spec.format}. Use 'nearest'."
    if spec.scaling == "row" and (spec.format != "nvfp4" or (spec.tile or (1, 16))[0] > 1):
        return f"scaling 'row' needs nvfp4 with tile [1, 16]; this is {what}. Use scaling 'tensor'."
    if spec.four_over_six and (
        spec.format != "nvfp4" or spec.rounding != "nearest" or spec.rotation or spec.correction
    ):
        return (
            f"four_over_six {spec.four_over_six!r} compares two nearest-rounded copies of an unrotated nvfp4 block; "
            f"this is {what}, rounding {spec.rounding!r}, rotation {spec.rotation}, correction {spec.correction}. "
            "Set four_over_six null here."
        )
    if spec.scale_rounding != "up" and spec.format not in ("mxfp4", "mxfp8"):
        return (
            f"scale_rounding {spec.scale_rounding!r} belongs to power-of-two block scales (mxfp4, mxfp8), not to "
            f"{spec.format}. Leave it out."
        )
    if spec.power_of_two and spec.format != "fp8_block":
        return f"power_of_two belongs to fp8_block, not to {spec.format}. Leave it out."
    if spec.correction and (spec.format, spec.rotation, spec.rounding, spec.scaling) != (
        "nvfp4",
        128,
        "nearest",
        "tensor",
    ):
        return (
            f"correction {spec.correction!r} needs nvfp4, rotation 128, nearest rounding and tensor scaling; this is "
            f"{what}, rotation {spec.rotation}, rounding {spec.rounding!r}, scaling {spec.scaling!r}. "
            "Change those, or set correction null."
        )
    return None
