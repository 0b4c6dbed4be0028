"""What a precision recipe may say, and the reasons given where it may not. No torch here.

The checks stand apart from the dataclasses of `config.py`, which call them when they are made: a configuration that
exists is a legal one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from nvfp4_train.precision.errors import PrecisionError
from nvfp4_train.precision.formats import unknown_name

if TYPE_CHECKING:
    from nvfp4_train.precision.config import Operand, PrecisionConfig

LETTERS = ("M", "-", "*")
ROLES = ("in_proj", "out_proj", "qkv", "proj", "fc1", "fc2", "output")
PASSES = ("bf16", "recipe")
BACKENDS = ("auto", "emulated", "native", "transformer_engine")
GEMMS = ("exact", "bf16_scaled")
KNOBS = ("rotation", "gradient_rounding", "weight_tile", "four_over_six")
DEFAULT_AMAX_HISTORY = 1024

_CONDITIONAL_COUNT = re.compile(r"(\d+) from (\d+) blocks?")


def choose(value: str, choices: Sequence[str], what: str) -> None:
    """Refuse a `value` that is none of `choices`, with the nearest of them."""
    if value not in choices:
        raise PrecisionError(unknown_name(what, value, tuple(choices)))


def block_count(end: str, value: float | int | str, num_blocks: int) -> int:
    """Blocks that `bf16_blocks.first` or `.last` (`end`) keeps in a model of `num_blocks`; see `config.Bf16Blocks`."""
    name = f"precision.bf16_blocks.{end}"
    advice = "Write a count (2), a share of the blocks below 1 (0.15), or a text such as '2 from 8 blocks'."
    if isinstance(value, str):
        found = _CONDITIONAL_COUNT.fullmatch(value.strip())
        if found is None:
            raise PrecisionError(f"{name}={value!r} is no number of blocks. {advice}")
        return int(found[1]) if num_blocks >= int(found[2]) else 0
    if isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise PrecisionError(f"{name}={value} is no number of blocks. {advice}")
    if value < 1:
        return math.ceil(Fraction(str(value)) * num_blocks)
    if value != int(value):
        raise PrecisionError(f"{name}={value} is neither a share below 1 nor a whole number of blocks. {advice}")
    return int(value)


def check_gemm(gemm: str, operands: Mapping[str, Operand], decodable: str | None) -> None:
    """Refuse two operands that cannot be multiplied: rotations that do not cancel, or decoded values that do not exist.

    `decodable` names the operand that has a quantized copy in the forward pass.
    """
    (first, one), (second, other) = operands.items()
    for name, operand in operands.items():
        if operand.source == "decoded" and name != decodable:
            raise PrecisionError(
                f"precision.{gemm}.{name}.source=decoded: only dgrad.weight and wgrad.input have a quantized copy in "
                "the forward pass to decode. Write source: original."
            )
    if (one.rotation, one.rotation and one.signs) != (other.rotation, other.rotation and other.signs):
        raise PrecisionError(
            f"precision.{gemm}: {first} is rotated by {_rotation(one)} and {second} by {_rotation(other)}. A rotation "
            "cancels in the product only if both operands have the same one: give both the same rotation and signs."
        )


def _rotation(operand: Operand) -> str:
    return f"{operand.rotation} ({operand.signs} signs)" if operand.rotation else "nothing"


def check_overrides(config: PrecisionConfig) -> None:
    """Refuse overrides that make no sense for the recipe, with recipe, override, reason, and what to write instead."""
    choose(config.backend, BACKENDS, "precision.backend")
    choose(config.gemm, GEMMS, "precision.gemm")
    check_choices(config)
    for knob in KNOBS:
        _check_reached(config, knob)
    _check_amax_history(config)
    if _formats(_operands(config)) == {"bf16"} and config.bf16_blocks.counts(1000) != (0, 0):
        raise PrecisionError(
            f"Recipe {config.name} keeps every linear in BF16, so precision.bf16_blocks has nothing to keep: leave it "
            "out, or choose a recipe that quantizes, for example precision=nvfp4."
        )
    _check_phases(config)


def _operands(config: PrecisionConfig) -> tuple[Operand, ...]:
    fprop, dgrad, wgrad = config.fprop, config.dgrad, config.wgrad
    return fprop.input, fprop.weight, dgrad.gradient, dgrad.weight, wgrad.gradient, wgrad.input


def _formats(operands: Iterable[Operand]) -> set[str]:
    return {operand.format for operand in operands}


def _knob_values(config: PrecisionConfig, knob: str) -> list[Any]:
    """What the operands that `knob` can concern really say."""
    if knob == "gradient_rounding":
        return [config.dgrad.gradient.rounding, config.wgrad.gradient.rounding]
    if knob == "weight_tile":
        return [config.fprop.weight.tile, config.dgrad.weight.tile]
    return [getattr(operand, knob) for operand in _operands(config)]


def check_choices(found: Any) -> None:
    """Refuse an override that is none of the recipe's `knobs`, with the reason.

    `found` is a `PrecisionConfig`, or the plain mapping that it will be made from: what was typed is judged before the
    operands that refer to it, so that the message names the override and not an operand.
    """
    for knob in KNOBS:
        value = _at(found, knob)
        offered = _at(found, f"knobs.{knob}") or (None,)
        choices = offered if isinstance(offered, tuple) else (value,)  # another type is the schema's to refuse
        if value not in choices:
            instead = "" if choices != (None,) else " (precision=nvfp4 has this override)"
            raise PrecisionError(
                f"precision.{knob}={written(value)} makes no sense for recipe {_at(found, 'name')}: "
                f"{_why_not(found, knob)}. Write precision.{knob}={' or '.join(map(written, choices))}{instead}."
            )


def _at(node: Any, path: str) -> Any:
    """What stands at a dotted path of nested mappings or objects, None where nothing does."""
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else getattr(node, key, None)
    return _as_tuples(node)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value


def _why_not(found: Any, knob: str) -> str:
    """Why the recipe does not take another value of `knob`."""
    gradients = _named_formats(found, "dgrad.gradient", "wgrad.gradient")
    corrected = _at(found, "wgrad.gradient.correction") is not None
    if knob == "rotation":
        if corrected:
            return "its correction is defined on groups of 128 rotated values"
        named = _named_formats(found, "wgrad.gradient", "wgrad.input")
        return f"a rotation spreads outliers over the 4-bit blocks of wgrad's operands, and its own are {named}"
    if knob == "gradient_rounding":
        if corrected:
            return "its correction makes rounding to nearest unbiased and is defined for that alone"
        if gradients == "bf16":
            return "its gradients stay in BF16 and are not rounded to a grid"
        return f"its gradients are {gradients}, and stochastic rounding is for gradients of 4 bits"
    if knob == "weight_tile":
        named = _named_formats(found, "fprop.weight", "dgrad.weight")
        return f"its weights are {named}, and other blocks than the format's are not defined"
    return "4 or 6 is chosen for nvfp4 blocks with nearest rounding and without rotation, by mse or mae"


def _named_formats(found: Any, *operands: str) -> str:
    return " and ".join(sorted({str(_at(found, f"{operand}.format")) for operand in operands}))


def _check_reached(config: PrecisionConfig, knob: str) -> None:
    """Refuse an override whose value no operand has: used, printed and saved must be one."""
    value = getattr(config, knob)
    if value is not None and value not in _knob_values(config, knob):
        raise PrecisionError(
            f"precision.{knob}={written(value)} reaches no operand of recipe {config.name}: set precision.{knob} "
            f"instead of the operands' own values, and let the operands refer to it as ${{precision.{knob}}}."
        )


def _check_amax_history(config: PrecisionConfig) -> None:
    if config.amax_history < 1:
        raise PrecisionError(f"precision.amax_history={config.amax_history}: a history has at least 1 step.")
    used = _formats(_operands(config)) | {rule.format for rule in (*config.rules, *config.recipe_rules)}
    if config.amax_history != DEFAULT_AMAX_HISTORY and "fp8_delayed" not in used:
        raise PrecisionError(
            f"precision.amax_history={config.amax_history} makes no sense for recipe {config.name}: only fp8_delayed "
            "scales by a history. Leave it out, or write precision=fp8_delayed."
        )


def _check_phases(config: PrecisionConfig) -> None:
    by_rule = {rule.format for rule in (*config.rules, *config.recipe_rules)} - {"bf16", "recipe"}
    backward = (config.dgrad.gradient, config.dgrad.weight, config.wgrad.gradient, config.wgrad.input)
    unchanged = {
        "forward": _formats((config.fprop.input, config.fprop.weight)) == {"bf16"},
        "backward": _formats(backward) == {"bf16"} and all(operand.source == "original" for operand in backward),
    }
    for phase in config.phases:
        for name, is_bf16 in unchanged.items():
            if getattr(phase, name) is not None and is_bf16 and not by_rule:
                raise PrecisionError(
                    f"precision.phases: {name}: {getattr(phase, name)} from {phase.start} on changes nothing, because "
                    f"the {name} pass of recipe {config.name} is BF16 throughout. Leave {name} out of the phase."
                )


def written(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.lstrip("-").isdigit():
        return f'"{value}" (text)'
    return f"[{','.join(map(str, value))}]" if isinstance(value, (tuple, list)) else str(value)
