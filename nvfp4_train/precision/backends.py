"""Who multiplies a recipe's numbers: emulation, this package's FP8 GEMMs, or Transformer Engine. No torch here.

    emulated             anywhere; see `gemm.py` for what it computes
    native               FP8 recipes on FP8 tensor cores through cuBLASLt, on Ada and Hopper; the others on Blackwell
                         through Transformer Engine
    transformer_engine   Transformer Engine, FP8 recipes too
    auto                 native where the hardware has it, else emulated; said aloud

A recipe runs as a whole in one backend (its BF16 linears in plain BF16), so that two runs of it never differ by a
kernel that was missing in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from nvfp4_train.precision.assignment import LinearPrecision, recipe_gemms
from nvfp4_train.precision.config import Operand, PrecisionConfig, PrecisionError
from nvfp4_train.precision.formats import FP8_FORMATS, element_of
from nvfp4_train.precision.recipes import standard_gemms
from nvfp4_train.precision.te_recipes import CLASSES, map_linears

# Least CUDA compute capability whose tensor cores multiply the format: Ada and Hopper for FP8 with one scale a tensor,
# Hopper for FP8 blocks, Blackwell for the microscaled formats and NVFP4.
NATIVE_SINCE = {
    "bf16": (8, 0),
    "fp8_current": (8, 9),
    "fp8_delayed": (8, 9),
    "fp8_block": (9, 0),
    "mxfp8": (10, 0),
    "mxfp4": (10, 0),
    "nvfp4": (10, 0),
}
HOPPER = (9, 0)
# Where the hardware dropped the format again: Blackwell has no FP32 block scales, only powers of two.
NATIVE_BEFORE = {"fp8_block": (10, 0)}


class Backend(NamedTuple):
    """What was chosen.

    Attributes:
        name: emulated, native or transformer_engine.
        why: one line to print.
    """

    name: str
    why: str

    def line(self, config: PrecisionConfig) -> str:
        """The choice for a recipe, as a line to print."""
        return f"precision {config.name}: {self.name} ({self.why})"


class TransformerEngine(NamedTuple):
    """Whether Transformer Engine can be used.

    Attributes:
        version: of what is installed, None where nothing is.
        failure: why it cannot be imported, None where it can.
    """

    version: str | None
    failure: str | None

    @property
    def problem(self) -> str | None:
        """One sentence on what is wrong, with what mends it."""
        install = "pip install transformer-engine[pytorch], see python -m nvfp4_train.doctor"
        if self.version is None:
            return f"Transformer Engine is not installed ({install})."
        if self.failure is not None:
            return f"Transformer Engine {self.version} cannot be imported: {self.failure} ({install})."
        return None


def choose_backend(
    config: PrecisionConfig,
    linears: Iterable[LinearPrecision],
    capability: tuple[int, int] | None,
    find_transformer_engine: Callable[[], TransformerEngine],
) -> Backend:
    """Decide who multiplies; before the model is built.

    Args:
        config: the recipe; its `backend` is what the user asks for.
        linears: what the recipe decided for the model.
        capability: the GPU's CUDA compute capability, None without one.
        find_transformer_engine: asked where it matters, since importing it takes time.

    Raises:
        PrecisionError: the backend that was asked for cannot run the recipe here: why, and what can.
    """
    if config.backend == "emulated":
        return Backend("emulated", "as asked")
    if config.gemm != "exact":
        if config.backend == "auto":
            return Backend("emulated", f"as precision.gemm={config.gemm} asks")
        raise PrecisionError(
            f"precision.gemm={config.gemm} is a way of emulation, and precision.backend={config.backend} does not "
            "emulate. Write precision.backend=emulated, or precision.gemm=exact."
        )
    if config.backend == "auto" and capability is None:
        return Backend("emulated", "no CUDA device")
    problem = native_problem(config, capability)
    if config.backend != "transformer_engine" and problem is None:
        return Backend("native", _native_words(config))
    by_te = map_linears(config, linears).problem or capability_problem(config, capability)  # what no card mends, first
    if by_te is None:
        found = find_transformer_engine()
        if found.problem is None:
            return Backend("transformer_engine", f"native through Transformer Engine {found.version}")
        by_te = found.problem
    if config.backend == "auto":
        return Backend("emulated", by_te.rstrip("."))
    raise PrecisionError(_refusal(config, by_te if _beyond_ours(config) else problem or by_te, capability))


def never_runs(config: PrecisionConfig, linears: Iterable[LinearPrecision]) -> str | None:
    """Why the backend that was asked for runs the recipe on no card at all; None where some card does."""
    if config.backend in ("auto", "emulated"):
        return None
    if _beyond_ours(config):
        return map_linears(config, linears).problem
    return pair_problem(config)


def _beyond_ours(config: PrecisionConfig) -> bool:
    """Whether the recipe or the user asks for Transformer Engine."""
    return config.backend == "transformer_engine" or not formats_in_use(config) <= {"bf16", *FP8_FORMATS}


def native_problem(config: PrecisionConfig, capability: tuple[int, int] | None) -> str | None:
    """Why this package's own GEMMs cannot run the recipe; None where they can."""
    others = sorted(formats_in_use(config) - {"bf16", *FP8_FORMATS})
    if others:
        return f"{' and '.join(others)} runs natively through Transformer Engine alone."
    return capability_problem(config, capability) or pair_problem(config)


def formats_in_use(config: PrecisionConfig) -> set[str]:
    """Formats that the recipe's operands and all rules name."""
    named = {operand.format for pair in _pairs(config) for operand in pair.values()}
    return named | {rule.format for rule in (*config.rules, *config.recipe_rules)} - {"recipe"}


def _pairs(config: PrecisionConfig) -> list[Mapping[str, Operand]]:
    """The operands of each GEMM of the recipe, and of each plain format that a rule names."""
    formats = {rule.format for rule in (*config.rules, *config.recipe_rules)} - {"recipe"}
    gemms = [recipe_gemms(config), *(standard_gemms(name) for name in sorted(formats))]
    return [vars(gemm) for three in gemms for gemm in three]


def pair_problem(config: PrecisionConfig) -> str | None:
    """Why FP8 tensor cores cannot multiply two operands of the recipe; None where they can multiply all."""
    for pair in _pairs(config):
        (first, one), (second, other) = pair.items()
        names = f"{first} ({_words(one)}) by {second} ({_words(other)})"
        if any(operand.source == "decoded" and operand.format != "bf16" for operand in (one, other)):
            return f"{names}: decoded operands are quantized again by emulation alone."
        if one.format != other.format:
            return f"{names}: the tensor cores multiply operands of one format."
        if (element_of(one), element_of(other)) == ("e5m2", "e5m2"):
            return f"{names}: the tensor cores multiply E5M2 by E4M3 alone."
        if one.format == "fp8_block" and one.tile == other.tile == (128, 128):
            return f"{names}: one of the two must have blocks of 1x128."
    return None


def _words(operand: Operand) -> str:
    tile = "" if operand.tile is None else f" {operand.tile[0]}x{operand.tile[1]}"
    return f"{operand.format}{tile} {element_of(operand)}"


def capability_problem(config: PrecisionConfig, capability: tuple[int, int] | None) -> str | None:
    """Which formats of the recipe this GPU's tensor cores do not multiply, with both compute capabilities; or None."""
    used = formats_in_use(config)
    here = "this machine has no CUDA device" if capability is None else f"this machine has {_dotted(capability)}"
    late = sorted(name for name in used if capability is None or NATIVE_SINCE[name] > capability)
    if late:
        needed = max(NATIVE_SINCE[name] for name in late)
        return f"{' and '.join(late)} needs compute capability {_dotted(needed)}, and {here}."
    assert capability is not None
    for name, end in NATIVE_BEFORE.items():
        if name in used and capability >= end:
            since = _dotted(NATIVE_SINCE[name])
            return f"{name} needs compute capability {since} (no FP32 scales from {_dotted(end)} on), and {here}."
    return None


def native_formats(capability: tuple[int, int] | None) -> list[str]:
    """Formats that run on a GPU's tensor cores, by this package or through Transformer Engine (which has no mxfp4)."""
    if capability is None:
        return []
    return [
        name
        for name, since in NATIVE_SINCE.items()
        if since <= capability
        and name in ("bf16", *CLASSES)
        and not (name in NATIVE_BEFORE and capability >= NATIVE_BEFORE[name])
    ]


def _refusal(config: PrecisionConfig, reason: str, capability: tuple[int, int] | None) -> str:
    fitting = native_formats(capability)
    others = f", or a recipe that runs natively here ({', '.join(fitting)})" if fitting else ""
    how = "through Transformer Engine" if config.backend == "transformer_engine" else "natively"
    return (
        f"Recipe {config.name} cannot run {how}: {reason} "
        f"Write precision.backend=emulated (the same numbers, slower){others}."
    )


def _native_words(config: PrecisionConfig) -> str:
    used = sorted(formats_in_use(config) - {"bf16"})
    return f"{' and '.join(used)} on FP8 tensor cores through cuBLASLt" if used else "BF16 tensor cores"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
