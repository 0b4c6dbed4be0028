"""What a precision recipe says, as frozen dataclasses. No torch here: commands read it before any heavy import.

A recipe names the two operands of each of a linear layer's three GEMMs:

    fprop  Y  = X W^T      input,    weight
    dgrad  dX = dY W       gradient, weight
    wgrad  dW = dY^T X     gradient, input

An operand is a `QuantSpec` plus where its numbers come from.
"""

from __future__ import annotations

from dataclasses import dataclass


class PrecisionError(ValueError):
    """A user's mistake about precision: says what was wrong, why, and what to write instead."""


@dataclass(frozen=True)
class QuantSpec:
    """How one tensor is quantized. All fields but `format` have defaults; None means 'the format's own'.

    Attributes:
        format: bf16, nvfp4, mxfp4, mxfp8, fp8_block, fp8_current or fp8_delayed.
        tile: rows x columns that share one block scale, blocks along the contraction. None: the format's row tile
            (1x16 nvfp4, 1x32 mxfp4 and mxfp8, 1x128 fp8_block, whole tensor for the others).
        rounding: nearest (even) or stochastic.
        rotation: size of the randomized Hadamard transform along the contraction, or None.
        scaling: tensor (one second-level scale) or row (one for each row); nvfp4 alone.
        four_over_six: None, mse or mae; nvfp4 with nearest rounding and without rotation alone.
        element: e2m1, e4m3 or e5m2. None: the format's own.
        signs: fixed (one sign vector for the whole run) or fresh (drawn from the random bits); with rotation.
        scale_rounding: up or ocp; mxfp4 and mxfp8 alone.
        power_of_two: block scales rounded to powers of two; fp8_block alone.
        correction: None or eden (Quartet II's unbiased block scales); nvfp4 alone.
    """

    format: str
    tile: tuple[int, int] | None = None
    rounding: str = "nearest"
    rotation: int | None = None
    scaling: str = "tensor"
    four_over_six: str | None = None
    element: str | None = None
    signs: str = "fixed"
    scale_rounding: str = "up"
    power_of_two: bool = False
    correction: str | None = None


@dataclass(frozen=True)
class Operand(QuantSpec):
    """One operand of a GEMM: how it is quantized, and from what (`original` high precision, or the forward's `decoded` values)."""

    source: str = "original"


@dataclass(frozen=True)
class Fprop:
    """Y = X W^T, contraction over in-features."""

    input: Operand
    weight: Operand


@dataclass(frozen=True)
class Dgrad:
    """dX = dY W, contraction over out-features."""

    gradient: Operand
    weight: Operand


@dataclass(frozen=True)
class Wgrad:
    """dW = dY^T X, contraction over tokens; both operands are quantized along tokens and share one rotation."""

    gradient: Operand
    input: Operand


@dataclass(frozen=True)
class Bf16Blocks:
    """Blocks kept in BF16 at both ends of the pattern: a count, or a share of the blocks when below 1 (rounded up)."""

    first: float = 0
    last: float = 0


@dataclass(frozen=True)
class Rule:
    """One ordered rule. Give at least one of `match`, `letter`, `role`; all that are given must hold.

    Attributes:
        match: glob on the linear's global name, for example `*.out_proj` or `decoder.layers.12.*`.
        letter: block letter, `M`, `-` or `*`.
        role: in_proj, out_proj, qkv, proj, fc1, fc2 or output.
        format: the recipe format to use there: bf16, nvfp4, mxfp4, mxfp8, fp8_block, fp8_current, fp8_delayed.
    """

    format: str
    match: str | None = None
    letter: str | None = None
    role: str | None = None


@dataclass(frozen=True)
class Phase:
    """From `start` on (share of the run below 1, a step, or a text such as `8.2T tokens`), use these passes.

    Attributes:
        forward: bf16, recipe (the recipe's own), or None (unchanged).
        backward: the same for dgrad and wgrad.
    """

    start: float | int | str
    forward: str | None = None
    backward: str | None = None


@dataclass(frozen=True)
class PrecisionConfig:
    """One recipe with the user's overrides applied: what a YAML file in `configs/precision/` holds."""

    name: str
    description: str
    source: str
    fprop: Fprop
    dgrad: Dgrad
    wgrad: Wgrad
    bf16_blocks: Bf16Blocks
    recipe_rules: tuple[Rule, ...] = ()
    rules: tuple[Rule, ...] = ()
    phases: tuple[Phase, ...] = ()
    backend: str = "auto"
    rotation: int | None = None
    gradient_rounding: str | None = None
    weight_tile: tuple[int, int] | None = None
    four_over_six: str | None = None
    amax_history: int = 1024
