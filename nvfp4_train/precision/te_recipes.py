"""What Transformer Engine calls our recipes, linear by linear, and what it has no word for. No torch here.

Transformer Engine describes the three GEMMs of a linear by one recipe object. The way there and back is written down:
`suggested` reads the recipe's arguments off a linear's operands, `operands_of` says which operands Transformer Engine
makes of those arguments, after its own recipe classes and quantizers (version 2.20). Where the two differ, something
would be lost, and the difference is the reason of a refusal. All arguments are given, none is left to a default: some
of its defaults are taken from environment variables, and an FP8 block scale is a power of two by default.

What runs then is Transformer Engine's arithmetic: its own random bits for stochastic rounding, and, with delayed
scaling, fast accumulation in fprop and a history that the gradients of a step's first micro-batch end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from nvfp4_train.precision.assignment import LinearPrecision
from nvfp4_train.precision.config import Operand, PrecisionConfig
from nvfp4_train.precision.formats import element_of

CLASSES = {
    "fp8_delayed": "DelayedScaling",
    "fp8_current": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
Pairs = Mapping[str, Mapping[str, Operand]]  # GEMM -> operand name -> operand


class TeRecipe(NamedTuple):
    """A recipe object of `transformer_engine.common.recipe`.

    Attributes:
        cls: its class.
        arguments: of its constructor; a `Format` by its name.
        power_of_two: what the scales of inputs, weights and gradients are rounded to, for FP8.
    """

    cls: str
    arguments: tuple[tuple[str, Any], ...]
    power_of_two: tuple[bool, bool, bool] | None = None


class Mapped(NamedTuple):
    """A model's linears in Transformer Engine's words.

    Attributes:
        recipes: name -> recipe of every linear that is not plain BF16.
        problem: what cannot be expressed, None where all can.
    """

    recipes: dict[str, TeRecipe]
    problem: str | None


def map_linears(config: PrecisionConfig, linears: Iterable[LinearPrecision]) -> Mapped:
    """Every linear's recipe object, or what Transformer Engine has no word for, with how many linears need it."""
    recipes: dict[str, TeRecipe] = {}
    problems: Counter[str] = Counter()
    for linear in linears:
        if linear.format == "bf16":
            continue
        found = map_linear(linear, config.amax_history)
        if isinstance(found, str):
            problems[found] += 1
        else:
            recipes[linear.name] = found
    for phase in config.phases:
        if phase.forward != phase.backward:
            problems["a phase that switches one of the passes to bf16 (write both, or neither)"] += 1
    words = "; ".join(f"{problem} ({count} linears)" if count > 1 else problem for problem, count in problems.items())
    return Mapped(recipes, f"Transformer Engine cannot express {words}." if words else None)


def map_linear(linear: LinearPrecision, amax_history: int) -> TeRecipe | str:
    """A quantized linear's recipe object, or what Transformer Engine has no word for."""
    pairs = linear.operands
    formats = {operand.format for pair in pairs.values() for operand in pair.values()}
    forward = {operand.format for operand in pairs["fprop"].values()}
    named = forward.pop() if len(forward) == 1 else None
    if named not in CLASSES or not formats <= {named, "bf16"}:
        return f"{linear.format} (its recipes have one of {', '.join(CLASSES)} forward, and the same or bf16 backward)"
    if any(operand.correction for pair in pairs.values() for operand in pair.values()):
        return f"{named} with the correction of block scales that Quartet II defines"
    recipe = suggested(named, pairs, amax_history)
    arguments = dict(recipe.arguments)
    if arguments.get("nvfp4_4over6") in ("activations", "all") and not arguments["disable_rht"]:
        return "four_over_six on inputs that are rotated for wgrad (its kernels have one or the other)"
    if arguments.get("row_scaled_activation") and arguments["backward_override"] is None:
        return "row scaling with a quantized backward pass"
    differences = [
        f"{gemm}.{name} {field}={_written(used)} (its {recipe.cls} has {_written(has)})"
        for gemm, pair in operands_of(recipe).items()
        for name, theirs in pair.items()
        for field, used, has in _differences(pairs[gemm][name], theirs)
    ]
    return ", ".join(differences) or recipe


def _differences(ours: Operand, theirs: Operand) -> list[tuple[str, Any, Any]]:
    """Field, what we say and what Transformer Engine would do, where the two differ."""
    names = [item.name for item in fields(ours) if item.name != "element"]
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    pairs.append(("element", element_of(ours), element_of(theirs)))
    return [pair for pair in pairs if pair[1] != pair[2]]


def _written(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def suggested(format: str, pairs: Pairs, amax_history: int) -> TeRecipe:
    """The recipe object that a linear's operands ask for; what it does not say is found by `operands_of`."""
    inputs, weights = pairs["fprop"]["input"], pairs["fprop"]["weight"]
    gradients, backward = pairs["dgrad"]["gradient"], pairs["dgrad"]["weight"]
    power_of_two = override = None
    if backward.format == "bf16":
        override = "dequantized" if backward.source == "decoded" else "high_precision"
    arguments: dict[str, Any] = {"fp8_dpa": False, "fp8_mha": False, "backward_override": override}
    if format == "nvfp4":
        arguments |= _nvfp4_arguments(pairs)
    else:
        arguments["fp8_format"] = "HYBRID" if element_of(gradients) == "e5m2" else "E4M3"
    if format == "mxfp8":
        arguments |= {"margin": 0, "enable_2d_quantization": weights.tile == (32, 32)}
    elif format == "fp8_block":
        dims = {"x": inputs, "w": weights, "grad": gradients}
        arguments |= {f"{name}_block_scaling_dim": 2 if o.tile == (128, 128) else 1 for name, o in dims.items()}
        power_of_two = (inputs.power_of_two, weights.power_of_two, gradients.power_of_two)
        arguments["use_f32_scales"] = not any(power_of_two)
    elif format == "fp8_current":
        power_of_two = (False, False, False)
        arguments["use_power_2_scales"] = False
    elif format == "fp8_delayed":
        arguments |= {"margin": 0, "amax_history_len": amax_history, "amax_compute_algo": "max"}
        arguments |= {"scaling_factor_compute_algo": None, "reduce_amax": True}
    return TeRecipe(CLASSES[format], tuple(arguments.items()), power_of_two)


def _nvfp4_arguments(pairs: Pairs) -> dict[str, Any]:
    inputs, weights = pairs["fprop"]["input"], pairs["fprop"]["weight"]
    gradients = pairs["dgrad"]["gradient"], pairs["wgrad"]["gradient"]
    scope = {(False, False): "none", (False, True): "weights", (True, False): "activations", (True, True): "all"}
    return {
        "disable_rht": pairs["wgrad"]["input"].rotation is None,
        "disable_stochastic_rounding": all(operand.rounding == "nearest" for operand in gradients),
        "disable_2d_quantization": weights.tile == (1, 16),
        "row_scaled_activation": inputs.scaling == "row",
        "nvfp4_4over6": scope[inputs.four_over_six is not None, weights.four_over_six is not None],
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": (inputs.four_over_six or weights.four_over_six or "mae").upper(),
        "fp4_format": "E2M1",
        "fp8_format": "E4M3",
    }


def operands_of(recipe: TeRecipe) -> Pairs:
    """The operands that Transformer Engine makes of a recipe object."""
    arguments = dict(recipe.arguments)
    format = next(name for name, cls in CLASSES.items() if cls == recipe.cls)
    make = _nvfp4_operands if format == "nvfp4" else _eight_bit_operands
    inputs, rotated_inputs, weights, gradients, rotated_gradients = make(format, arguments, recipe.power_of_two)
    backward_weights = weights
    if arguments["backward_override"] is not None:
        source = "decoded" if arguments["backward_override"] == "dequantized" else "original"
        rotated_inputs = backward_weights = Operand("bf16", source=source)
        gradients = rotated_gradients = Operand("bf16")
    return {
        "fprop": {"input": inputs, "weight": weights},
        "dgrad": {"gradient": gradients, "weight": backward_weights},
        "wgrad": {"gradient": rotated_gradients, "input": rotated_inputs},
    }


def _nvfp4_operands(format: str, arguments: Mapping[str, Any], _: object) -> tuple[Operand, ...]:
    mode = arguments["nvfp4_4over6_err_mode"].lower()
    scope = arguments["nvfp4_4over6"]
    on_inputs, on_weights = (mode if scope in (name, "all") else None for name in ("activations", "weights"))
    rotation = None if arguments["disable_rht"] else 16
    rounding = "nearest" if arguments["disable_stochastic_rounding"] else "stochastic"
    tile = (1, 16) if arguments["disable_2d_quantization"] else (16, 16)
    scaling = "row" if arguments["row_scaled_activation"] else "tensor"
    return (
        Operand(format, (1, 16), scaling=scaling, four_over_six=on_inputs),
        Operand(format, (1, 16), rotation=rotation, four_over_six=on_inputs),
        Operand(format, tile, four_over_six=on_weights),
        Operand(format, (1, 16), rounding),
        Operand(format, (1, 16), rounding, rotation),
    )


def _eight_bit_operands(
    format: str, arguments: Mapping[str, Any], power_of_two: tuple[bool, bool, bool] | None
) -> tuple[Operand, ...]:
    tiles: list[tuple[int, int] | None] = [None, None, None]
    if format == "mxfp8":
        tiles = [(1, 32), (32, 32) if arguments["enable_2d_quantization"] else (1, 32), (1, 32)]
    elif format == "fp8_block":
        dims = (arguments[f"{name}_block_scaling_dim"] for name in ("x", "w", "grad"))
        tiles = [(128, 128) if dim == 2 else (1, 128) for dim in dims]
    backward = "e5m2" if arguments["fp8_format"] == "HYBRID" and format in ("fp8_current", "fp8_delayed") else "e4m3"
    rounded = power_of_two or (False, False, False)
    inputs, weights, gradients = (
        Operand(format, tile, power_of_two=power, element=element)
        for tile, power, element in zip(tiles, rounded, ("e4m3", "e4m3", backward), strict=True)
    )
    return inputs, inputs, weights, gradients, gradients


def build(recipe: TeRecipe, module: Any) -> Any:
    """The recipe object itself.

    Args:
        module: `transformer_engine.common.recipe`.
    """
    arguments = dict(recipe.arguments)
    for name in ("fp8_format", "fp4_format"):
        if name in arguments:
            arguments[name] = getattr(module.Format, arguments[name])
    if recipe.cls in ("Float8CurrentScaling", "Float8BlockScaling"):
        # By default fprop with current scaling adds partial sums up in the tensor cores' own precision.
        exact = module.MMParams(use_split_accumulator=True)
        arguments |= {f"fp8_gemm_{gemm}": exact for gemm in ("fprop", "dgrad", "wgrad")}
    made = getattr(module, recipe.cls)(**arguments)
    if recipe.power_of_two is not None:
        names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
        for name, power in zip(names, recipe.power_of_two, strict=True):
            setattr(made, name, module.QParams(power_2_scale=power, amax_epsilon=0.0))
    return made
