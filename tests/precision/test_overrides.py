"""Every documented override on every recipe: it reaches exactly the operands it should, or is refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvfp4_train.precision.config import PrecisionError
from tests.precision.recipe_files import NAMES, operands, recipe

VALUES = {
    "rotation": [None, 16, 32, 64, 128],
    "gradient_rounding": ["nearest", "stochastic"],
    "weight_tile": [(16, 16), (1, 16), (32, 32), (1, 32)],
    "four_over_six": [None, "mse", "mae"],
}
FIELDS = {
    "rotation": "rotation",
    "gradient_rounding": "rounding",
    "weight_tile": "tile",
    "four_over_six": "four_over_six",
}

WGRAD = ("wgrad.gradient", "wgrad.input")
GRADIENTS = ("dgrad.gradient", "wgrad.gradient")
WEIGHTS = ("fprop.weight", "dgrad.weight")
BACKWARD = ("dgrad.gradient", "dgrad.weight", *WGRAD)
FPROP = ("fprop.input", "fprop.weight")
ROTATIONS = dict.fromkeys(VALUES["rotation"], WGRAD)
ROUNDINGS = dict.fromkeys(VALUES["gradient_rounding"], GRADIENTS)
TILES, FOUR_OVER_SIX = [(16, 16), (1, 16)], [None, "mse", "mae"]
on = dict.fromkeys  # values, and the operands they all reach

NVFP4 = {
    "rotation": ROTATIONS,
    "gradient_rounding": ROUNDINGS,
    "weight_tile": on(TILES, WEIGHTS),
    "four_over_six": on(FOUR_OVER_SIX, (*FPROP, "dgrad.weight")),
}
NVFP4_BACKWARD = {
    **NVFP4,
    "weight_tile": on(TILES, ("dgrad.weight",)),
    "four_over_six": on(FOUR_OVER_SIX, ("dgrad.weight",)),
}
NVFP4_FORWARD = {"weight_tile": on(TILES, ("fprop.weight",)), "four_over_six": on(FOUR_OVER_SIX, FPROP)}
NEAREST_8_BIT = {"gradient_rounding": {"nearest": GRADIENTS}}
# recipe -> override -> value -> operands it reaches. A value that is not here is refused; null, where a recipe has no
# such override, is what it says already.
WORKS: dict = {  # type: ignore[type-arg]
    "bf16": {},
    "fp8_block": NEAREST_8_BIT,
    "fp8_current": NEAREST_8_BIT,
    "fp8_delayed": NEAREST_8_BIT,
    "mxfp8": NEAREST_8_BIT,
    "mxfp4": {"rotation": ROTATIONS, "gradient_rounding": ROUNDINGS, "weight_tile": on([(32, 32), (1, 32)], WEIGHTS)},
    "nvfp4": NVFP4,
    "nvfp4_four_over_six": NVFP4,
    "nemotron3_super": NVFP4,
    "quartet2": {"rotation": {128: BACKWARD}, "gradient_rounding": {"nearest": BACKWARD}, **NVFP4_FORWARD},
    "nvfp4_fwd_bf16_bwd": NVFP4_FORWARD,
    "bf16_fwd_nvfp4_bwd": NVFP4_BACKWARD,
    "mxfp8_fwd_nvfp4_bwd": NVFP4_BACKWARD,
    "nvfp4_fwd_mxfp8_bwd": {**NVFP4_FORWARD, **NEAREST_8_BIT},
}
CASES = [(name, knob, value) for name in NAMES for knob, values in VALUES.items() for value in values]


def as_yaml(value: object) -> str:
    return "null" if value is None else str(list(value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(("name", "knob", "value"), CASES)
def test_override_reaches_its_operands_or_is_refused(name: str, knob: str, value: object) -> None:
    override = f"{knob}={as_yaml(value)}"
    legal = WORKS[name].get(knob, {None: ()})
    if value not in legal:
        with pytest.raises(PrecisionError) as error:
            recipe(name, override)
        message = str(error.value)
        assert f"precision.{knob}=" in message
        assert f"makes no sense for recipe {name}: " in message
        return
    config = recipe(name, override)
    assert getattr(config, knob) == value
    expected = {
        place: replace(operand, **{FIELDS[knob]: value}) if place in legal[value] else operand
        for place, operand in operands(recipe(name)).items()
    }
    assert operands(config) == expected


@pytest.mark.parametrize("name", NAMES)
def test_all_overrides_at_once(name: str) -> None:
    """The last legal value of every override together, which is far from what was published."""
    chosen = {knob: list(values)[-1] for knob, values in WORKS[name].items()}
    config = recipe(name, *(f"{knob}={as_yaml(value)}" for knob, value in chosen.items()))
    for knob, value in chosen.items():
        for place in WORKS[name][knob][value]:
            assert getattr(operands(config)[place], FIELDS[knob]) == value


@pytest.mark.parametrize(
    ("name", "override", "parts"),
    [
        ("mxfp8", "rotation=16", ["precision.rotation=16", "recipe mxfp8", "4-bit", "precision.rotation=null"]),
        ("fp8_block", "four_over_six=mse", ["precision.four_over_six=mse", "recipe fp8_block", "nvfp4 blocks", "null"]),
        ("mxfp4", "four_over_six=mae", ["precision.four_over_six=mae", "recipe mxfp4", "nvfp4 blocks"]),
        ("bf16", "gradient_rounding=stochastic", ["recipe bf16", "stay in BF16", "precision.gradient_rounding=null"]),
        ("nvfp4_fwd_bf16_bwd", "gradient_rounding=nearest", ["recipe nvfp4_fwd_bf16_bwd", "stay in BF16"]),
        (
            "mxfp8",
            "gradient_rounding=stochastic",
            ["recipe mxfp8", "gradients of 4 bits", "precision.gradient_rounding=nearest"],
        ),
        ("fp8_block", "weight_tile=[16, 16]", ["precision.weight_tile=[16,16]", "recipe fp8_block", "null"]),
        ("mxfp4", "weight_tile=[16, 16]", ["precision.weight_tile=[16,16]", "[32,32] or [1,32]"]),
        ("nvfp4", "gradient_rounding=null", ["precision.gradient_rounding=null", "stochastic or nearest"]),
        ("nvfp4", "weight_tile=null", ["precision.weight_tile=null", "[16,16] or [1,16]"]),
        ("quartet2", "rotation=null", ["recipe quartet2", "groups of 128", "Write precision.rotation=128."]),
        ("quartet2", "rotation=64", ["recipe quartet2", "groups of 128"]),
        ("nvfp4", "rotation=17", ["precision.rotation=17", "16 or null or 32 or 64 or 128"]),
        ("nvfp4", "four_over_six=abs", ["precision.four_over_six=abs", "null or mse or mae"]),
        ("nvfp4", "backend=fast", ["backend", "fast", "auto, emulated, native"]),
        ("nvfp4", "amax_history=16", ["precision.amax_history=16", "recipe nvfp4", "fp8_delayed"]),
        ("fp8_delayed", "amax_history=0", ["precision.amax_history=0", "at least 1"]),
        ("bf16", "bf16_blocks.last=2", ["Recipe bf16", "precision.bf16_blocks", "precision=nvfp4"]),
        ("bf16", "phases=[{start: 0.5, forward: bf16}]", ["forward", "0.5", "changes nothing", "recipe bf16"]),
        ("bf16_fwd_nvfp4_bwd", "phases=[{start: 0.5, forward: bf16}]", ["forward", "bf16_fwd_nvfp4_bwd"]),
        ("nvfp4", "phases=[{start: 0.5}]", ["changes nothing", "forward or backward"]),
        ("nvfp4", "phases=[{start: 0.5, forward: fp8}]", ["precision.phases[0]", "fp8", "bf16, recipe"]),
        ("nvfp4", "bf16_blocks.first=-1", ["precision.bf16_blocks.first=-1", "0.15"]),
        ("nvfp4", "bf16_blocks.last=1.5", ["precision.bf16_blocks.last=1.5", "whole number"]),
        ("nvfp4", "bf16_blocks.last=few", ["'few'", "2 from 8 blocks"]),
        ("nvfp4", "rules=[{match: '*', format: fp4}]", ["precision.rules[0]", "'fp4'", "mxfp4"]),
        ("nvfp4", "rules=[{letter: m, format: bf16}]", ["precision.rules[0]", "letter", "'m'", "M"]),
        ("nvfp4", "rules=[{role: outproj, format: bf16}]", ["precision.rules[0]", "Did you mean 'out_proj'"]),
        ("nvfp4", "rules=[{format: bf16}]", ["precision.rules[0]", "match", "letter", "role"]),
        ("mxfp8", "dgrad.gradient.element=e5m2", ["precision.dgrad.gradient", "e5m2", "mxfp8", "e4m3"]),
        ("nvfp4", "wgrad.gradient.rotation=32", ["wgrad", "32", "16", "same rotation"]),
        ("nvfp4", "fprop.input.source=decoded", ["precision.fprop.input.source=decoded", "original"]),
    ],
)
def test_refusals_say_what_why_and_what_to_write(name: str, override: str, parts: list[str]) -> None:
    with pytest.raises(PrecisionError) as error:
        recipe(name, override)
    for part in parts:
        assert part in str(error.value)


def test_operands_set_against_their_override_are_refused() -> None:
    """What is printed as precision.rotation must be what runs."""
    with pytest.raises(PrecisionError, match=r"precision\.rotation=16 reaches no operand of recipe nvfp4"):
        recipe("nvfp4", "wgrad.gradient.rotation=32", "wgrad.input.rotation=32")


@pytest.mark.parametrize("name", NAMES)
def test_every_backend_can_be_asked_for(name: str) -> None:
    for backend in ("auto", "emulated", "native"):
        assert recipe(name, f"backend={backend}").backend == backend


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bf16"])
def test_blocks_and_rules_can_be_set_on_every_recipe_that_quantizes(name: str) -> None:
    config = recipe(
        name, "bf16_blocks.first=2", "bf16_blocks.last=0.25", "rules=[{match: '*.out_proj', format: mxfp8}]"
    )
    assert config.bf16_blocks.counts(10) == (2, 3)
    assert [str(rule) for rule in config.rules] == ["match *.out_proj -> mxfp8"]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("bf16", "bf16_fwd_nvfp4_bwd")])
def test_the_late_switch_can_be_asked_for(name: str) -> None:
    phases = recipe(name, "phases=[{start: 0.82, forward: bf16}]").phases
    assert [(phase.start, phase.forward, phase.backward) for phase in phases] == [(0.82, "bf16", None)]


def test_bf16_with_rules_takes_a_phase() -> None:
    config = recipe("bf16", "rules=[{role: fc1, format: nvfp4}]", "phases=[{start: 0.5, forward: bf16}]")
    assert len(config.phases) == 1


def test_an_operand_option_without_an_override_of_its_own() -> None:
    assert recipe("fp8_current", "dgrad.gradient.element=e4m3").dgrad.gradient.element == "e4m3"
    assert recipe("fp8_block", "fprop.input.power_of_two=true").fprop.input.power_of_two is True
    assert recipe("mxfp8", "fprop.input.scale_rounding=ocp").fprop.input.scale_rounding == "ocp"
    assert recipe("fp8_delayed", "amax_history=16").amax_history == 16
