"""Recipes in Transformer Engine's words: every recipe of ours is mapped with nothing lost, or refused by name."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

import pytest

from nvfp4_train.precision.assignment import assign
from nvfp4_train.precision.formats import element_of
from nvfp4_train.precision.te_recipes import TeRecipe, build, map_linears, operands_of

from . import te_stand_in
from .recipe_files import NAMES, recipe, shapes

PATTERN = "M-*-M-*-M-"


def mapped(name: str, *overrides: str) -> tuple[dict[str, TeRecipe], str | None]:
    config = recipe(name, *overrides)
    return map_linears(config, assign(config, shapes(PATTERN)))


def built(name: str, *overrides: str) -> Any:
    """The one recipe object that all quantized linears have."""
    recipes, problem = mapped(name, *overrides)
    assert problem is None
    (found,) = set(recipes.values())
    return build(found, te_stand_in)


def test_fp8_block_has_fp32_scales_whatever_the_environment_says() -> None:
    made = built("fp8_block")
    assert isinstance(made, te_stand_in.Float8BlockScaling)
    assert made.use_f32_scales
    for params in (made.fp8_quant_fwd_inp, made.fp8_quant_fwd_weight, made.fp8_quant_bwd_grad):
        assert not params.power_2_scale
    assert (made.x_block_scaling_dim, made.w_block_scaling_dim, made.grad_block_scaling_dim) == (1, 2, 1)
    assert made.fp8_format == te_stand_in.Format.E4M3


def test_fp8_current_adds_up_in_fp32_and_has_no_powers_of_two() -> None:
    made = built("fp8_current")
    assert isinstance(made, te_stand_in.Float8CurrentScaling)
    assert not made.use_power_2_scales
    assert not made.fp8_quant_fwd_weight.power_2_scale
    assert made.fp8_gemm_fprop.use_split_accumulator
    assert made.fp8_format == te_stand_in.Format.HYBRID
    e4m3 = ("dgrad.gradient.element=e4m3", "wgrad.gradient.element=e4m3")
    assert built("fp8_current", *e4m3).fp8_format == te_stand_in.Format.E4M3


def test_fp8_delayed() -> None:
    made = built("fp8_delayed", "amax_history=16")
    assert isinstance(made, te_stand_in.DelayedScaling)
    assert (made.margin, made.amax_history_len, made.amax_compute_algo) == (0, 16, "max")
    assert made.reduce_amax


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ((), {}),
        (("rotation=null",), {"disable_rht": True}),
        (("gradient_rounding=nearest",), {"disable_stochastic_rounding": True}),
        (("weight_tile=[1, 16]",), {"disable_2d_quantization": True}),
        (
            ("fprop.weight.four_over_six=mse", "dgrad.weight.four_over_six=mse", "fprop.input.four_over_six=null"),
            {"nvfp4_4over6": "weights", "nvfp4_4over6_err_mode": "MSE"},
        ),
    ],
    ids=str,
)
def test_every_part_of_nvfp4_has_its_argument(overrides: tuple[str, ...], changed: dict[str, object]) -> None:
    published = {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "fp4_format": te_stand_in.Format.E2M1,
        "fp8_format": te_stand_in.Format.E4M3,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    }
    made = built("nvfp4", *overrides)
    assert isinstance(made, te_stand_in.NVFP4BlockScaling)
    assert asdict(made) == published | changed


def test_bf16_backward_on_decoded_operands() -> None:
    made = built("nvfp4_fwd_bf16_bwd")
    assert isinstance(made, te_stand_in.NVFP4BlockScaling)
    assert made.backward_override == "dequantized"
    assert made.row_scaled_activation
    assert (made.nvfp4_4over6, made.nvfp4_4over6_err_mode) == ("all", "MSE")


def test_exceptions_of_single_linears_are_kept() -> None:
    config = recipe("nemotron3_super")
    linears = assign(config, shapes(PATTERN))
    recipes, problem = map_linears(config, linears)
    assert problem is None
    for linear in linears:
        found = recipes.get(linear.name)
        expected = {"nvfp4": "NVFP4BlockScaling", "mxfp8": "MXFP8BlockScaling", "bf16": None}[linear.format]
        assert (found and found.cls) == expected, linear.name
    assert {linear.format for linear in linears if linear.role == "out_proj"} == {"mxfp8", "bf16"}


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_back_is_what_was_meant(name: str) -> None:
    config = recipe(name)
    linears = assign(config, shapes(PATTERN))
    recipes, problem = map_linears(config, linears)
    assert (problem is None) == (name in MAPPED)
    for linear in linears:
        if linear.name in recipes:
            for gemm, pair in operands_of(recipes[linear.name]).items():
                for kind, theirs in pair.items():
                    ours = linear.operands[gemm][kind]
                    assert asdict(theirs) | {"element": None} == asdict(ours) | {"element": None}
                    assert element_of(theirs) == element_of(ours)


MAPPED = ("bf16", "fp8_block", "fp8_current", "fp8_delayed", "mxfp8", "nvfp4", "nemotron3_super", "nvfp4_fwd_bf16_bwd")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("mxfp4",), "mxfp4 (its recipes have one of"),
        (("quartet2",), "Quartet II"),
        (("nvfp4_fwd_mxfp8_bwd",), "nvfp4 fwd, mxfp8 bwd"),
        (("bf16_fwd_nvfp4_bwd",), "bf16 fwd, nvfp4 bwd"),
        (("nvfp4_four_over_six",), "four_over_six on inputs that are rotated"),
        (("nvfp4", "rotation=32"), "wgrad.gradient rotation=32 (its NVFP4BlockScaling has 16)"),
        (("nvfp4", "fprop.input.scaling=row"), "row scaling with a quantized backward pass"),
        (("fp8_block", "fprop.input.power_of_two=true"), "wgrad.input power_of_two=False"),
        (("mxfp8", "wgrad.input.scale_rounding=ocp"), "wgrad.input scale_rounding=ocp"),
        (("nvfp4", "phases=[{start: 0.8, forward: bf16}]"), "a phase that switches one of the passes"),
    ],
    ids=str,
)
def test_what_it_cannot_express_is_refused_by_name(overrides: tuple[str, ...], words: str) -> None:
    _, problem = mapped(*overrides)
    assert problem is not None
    assert problem.startswith("Transformer Engine cannot express ")
    assert words in problem


def test_the_stand_in_has_the_real_signatures() -> None:
    real = pytest.importorskip("transformer_engine.common.recipe")
    for name in (
        "DelayedScaling",
        "Float8CurrentScaling",
        "Float8BlockScaling",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
    ):
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (te_stand_in, real))
        assert list(ours) == list(theirs), name
