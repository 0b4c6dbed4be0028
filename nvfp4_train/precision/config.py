"""What a precision recipe says, as frozen dataclasses. No torch here: commands read it before any heavy import.

A recipe names the two operands of each of a linear layer's three GEMMs:

    fprop  Y  = X W^T      input,    weight
    dgrad  dX = dY W       gradient, weight
    wgrad  dW = dY^T X     gradient, input

An operand is a `QuantSpec` plus where its numbers come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvfp4_train.precision.errors import PrecisionError as PrecisionError
from nvfp4_train.precision.formats import FORMATS, find_problem, natural_tile, unknown_name
from nvfp4_train.precision.validation import (
    DEFAULT_AMAX_HISTORY,
    LETTERS,
    PASSES,
    ROLES,
    block_count,
    check_choices,
    check_gemm,
    check_overrides,
    choose,
)


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
        correction: None or eden (Quartet II's unbiased block scales); nvfp4 with rotation 128 alone.

    Raises:
        PrecisionError: for an unknown name, or a pair that makes no sense.
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

    def __post_init__(self) -> None:
        if self.tile is not None:
            object.__setattr__(self, "tile", tuple(self.tile))
        problem = find_problem(self)
        if problem:
            raise PrecisionError(problem)
        if self.tile is None:
            object.__setattr__(self, "tile", natural_tile(self.format))


@dataclass(frozen=True)
class Operand(QuantSpec):
    """One operand of a GEMM: how it is quantized, and from what.

    Attributes:
        source: original (the high-precision tensor), or decoded (the values that the forward GEMM multiplied); decoded
            is for dgrad's weight and wgrad's input, which have a copy in the forward pass.
    """

    source: str = "original"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source not in ("original", "decoded"):
            raise PrecisionError(unknown_name("source", self.source, ("original", "decoded")))


@dataclass(frozen=True)
class Fprop:
    """Y = X W^T, contraction over in-features."""

    input: Operand
    weight: Operand

    def __post_init__(self) -> None:
        check_gemm("fprop", {"input": self.input, "weight": self.weight}, decodable=None)


@dataclass(frozen=True)
class Dgrad:
    """dX = dY W, contraction over out-features."""

    gradient: Operand
    weight: Operand

    def __post_init__(self) -> None:
        check_gemm("dgrad", {"gradient": self.gradient, "weight": self.weight}, decodable="weight")


@dataclass(frozen=True)
class Wgrad:
    """dW = dY^T X, contraction over tokens; both operands are quantized along tokens and share one rotation."""

    gradient: Operand
    input: Operand

    def __post_init__(self) -> None:
        check_gemm("wgrad", {"gradient": self.gradient, "input": self.input}, decodable="input")


@dataclass(frozen=True)
class Bf16Blocks:
    """Blocks kept in BF16 at both ends of the pattern.

    Each of `first` and `last` is a count, a share of the blocks when below 1 (rounded up), or a text such as
    `2 from 8 blocks`: 2 in models of 8 blocks or more, none in smaller ones.
    """

    first: float | int | str = 0
    last: float | int | str = 0

    def __post_init__(self) -> None:
        self.counts(1)

    def counts(self, num_blocks: int) -> tuple[int, int]:
        """How many first and last blocks stay in BF16 in a model of `num_blocks`. Raises PrecisionError."""
        return block_count("first", self.first, num_blocks), block_count("last", self.last, num_blocks)


@dataclass(frozen=True)
class Rule:
    """One ordered rule. Give at least one of `match`, `letter`, `role`; all that are given must hold.

    Attributes:
        match: glob on the linear's global name, for example `*.out_proj` or `decoder.layers.12.*`.
        letter: block letter, `M`, `-` or `*`.
        role: in_proj, out_proj, qkv, proj, fc1, fc2 or output.
        format: what to use there: bf16, the published operands of nvfp4, mxfp4, mxfp8, fp8_block, fp8_current or
            fp8_delayed, or `recipe` for the recipe's own operands.
    """

    format: str
    match: str | None = None
    letter: str | None = None
    role: str | None = None

    def __post_init__(self) -> None:
        choose(self.format, (*FORMATS, "recipe"), "format")
        if self.letter is not None:
            choose(self.letter, LETTERS, "letter")
        if self.role is not None:
            choose(self.role, ROLES, "role")
        if self.match is None and self.letter is None and self.role is None:
            raise PrecisionError(
                f"A rule with format {self.format} says nowhere where it holds: give match (a glob such as "
                f"'*.out_proj'), letter ({', '.join(LETTERS)}) or role ({', '.join(ROLES)})."
            )

    def __str__(self) -> str:
        where = {"match": self.match, "letter": self.letter, "role": self.role}
        return ", ".join(f"{key} {value}" for key, value in where.items() if value is not None) + f" -> {self.format}"


@dataclass(frozen=True)
class Phase:
    """From `start` on, these passes. What a phase leaves out stays as it was before.

    Attributes:
        start: how much of the run is done when the phase begins: a share below 1, a number of steps (500: step 501 is
            the first), or a text such as `8.2T tokens`.
        forward: bf16, recipe (the recipe's own), or None (unchanged).
        backward: the same for dgrad and wgrad.
    """

    start: float | int | str
    forward: str | None = None
    backward: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("forward", self.forward), ("backward", self.backward)):
            if value is not None:
                choose(value, PASSES, name)
        if self.forward is None and self.backward is None:
            raise PrecisionError(
                f"The phase that starts at {self.start} changes nothing: give forward or backward (bf16 or recipe)."
            )


@dataclass(frozen=True)
class Knobs:
    """What each override of a recipe may be set to, the published value first. Empty: no operand has such a thing."""

    rotation: tuple[int | None, ...] = ()
    gradient_rounding: tuple[str | None, ...] = ()
    weight_tile: tuple[tuple[int, int] | None, ...] = ()
    four_over_six: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class PrecisionConfig:
    """One recipe with the user's overrides applied: what a YAML file in `configs/precision/` holds.

    Attributes:
        name, description, source: what `plan --recipes` lists; source is where the recipe was published.
        fprop, dgrad, wgrad: the operands of the three GEMMs. They refer to the overrides below by interpolation, so
            what is set there is what the operand says: used, printed and saved.
        bf16_blocks: blocks at both ends that stay in BF16.
        recipe_rules: the recipe's own rules, decided after `bf16_blocks`.
        rules: the user's rules, decided before everything else.
        phases: passes that change during the run.
        backend: auto (native where the hardware has it), emulated, native or transformer_engine.
        gemm: how emulation multiplies: exact (scales on the FP32 accumulator), or bf16_scaled, which rounds each scaled
            operand to BF16 first (an error of at most 2^-9 of a value) and multiplies with a plain BF16 GEMM.
        rotation: size of the Hadamard rotation of the rotated operands, or None for none.
        gradient_rounding: nearest or stochastic.
        weight_tile: rows x columns of a weight that share a block scale.
        four_over_six: None, mse or mae, on operands with nearest rounding and without rotation.
        amax_history: steps in the amax history of delayed scaling.
        knobs: what the four overrides above may be set to.
    """

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
    gemm: str = "exact"
    rotation: int | None = None
    gradient_rounding: str | None = None
    weight_tile: tuple[int, int] | None = None
    four_over_six: str | None = None
    amax_history: int = DEFAULT_AMAX_HISTORY
    knobs: Knobs = Knobs()

    def __post_init__(self) -> None:
        check_overrides(self)

    @staticmethod
    def check_mapping(mapping: Mapping[str, Any]) -> None:
        """What the schema asks before it builds the operands; see `validation.check_choices`."""
        check_choices(mapping)
