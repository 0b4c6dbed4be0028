"""The three GEMMs of every recipe against float64 products of operands quantized one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nvfp4_train.precision.config import Fprop, Operand
from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.quantizer import quantize_values

from .linears import assert_rounded, expected, precision, run, standalone, tensors
from .recipe_files import NAMES

VARIANTS = [
    (name,) for name in NAMES
] + [  # a knob of the recipe switched off or turned
    ("nvfp4", "rotation=null"),
    ("nvfp4", "rotation=128"),
    ("nvfp4", "gradient_rounding=nearest"),
    ("nvfp4", "weight_tile=[1, 16]"),
    ("nvfp4", "four_over_six=mse"),
    ("mxfp4", "weight_tile=[1, 32]"),
    ("quartet2", "four_over_six=null"),
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_products_of_a_recipe(variant: tuple[str, ...]) -> None:
    assignment = precision(*variant)
    x, w, dy = tensors()
    gemms = standalone(assignment)
    for found, exact in zip(run(gemms, x, w, dy), expected(assignment, x, w, dy), strict=True):
        assert_rounded(found, exact)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_block", "fp8_current", "mxfp8"])
def test_scaled_operands_rounded_to_bf16_first(name: str) -> None:
    """Each operand is off by at most 2^-9 of a value; without scales beside the values nothing is lost."""
    assignment = precision(name)
    x, w, dy = tensors()
    exact = run(standalone(assignment), x, w, dy)
    rounded = run(standalone(assignment, gemm="bf16_scaled"), x, w, dy)
    for found, reference in zip(rounded, exact, strict=True):
        error = float((found.double() - reference.double()).norm() / reference.double().norm())
        assert error < 2.0**-8
        assert (error > 0) == (name != "mxfp8")
    y = quantize_values(x, assignment.operands["fprop"]["input"]).dequantize().bfloat16().double()
    y @= quantize_values(w, assignment.operands["fprop"]["weight"]).dequantize().bfloat16().double().t()
    assert_rounded(rounded[0], y)


def test_dtypes() -> None:
    x, w, dy = tensors()
    for name in ("bf16", "nvfp4"):
        y, dx, dw = run(standalone(precision(name)), x, w, dy)
        assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("variant", "made"),
    [
        (("nvfp4",), 1),  # 16x16 tiles: dgrad multiplies the very tensor that fprop did
        (("nvfp4", "weight_tile=[1, 16]"), 2),
        (("mxfp4",), 1),
        (("mxfp8",), 2),
        (("fp8_block",), 1),
        (("fp8_current",), 1),
        (("nvfp4_fwd_bf16_bwd",), 2),
        (("quartet2",), 1),  # dgrad's depends on the micro-batch's random bits, so it is not kept
        (("bf16",), 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_weights_made_a_step(variant: tuple[str, ...], made: int) -> None:
    gemms = standalone(precision(*variant))
    run(gemms, *tensors())
    assert len(gemms._weights) == made


def test_dgrad_multiplies_the_tensor_of_fprop() -> None:
    gemms = standalone(precision("nvfp4"))
    _, w, _ = tensors()
    call = gemms.runtime.call()
    assert gemms._weight(w, "fprop", 1, call) is gemms._weight(w, "dgrad", 0, call)


@pytest.mark.parametrize("tokens", [1, 100, 144])
@pytest.mark.parametrize(
    "variant",
    [("nvfp4", "gradient_rounding=nearest"), ("nvfp4", "gradient_rounding=nearest", "rotation=128"), ("mxfp8",),
     ("fp8_block",)],
    ids=" ".join,
)  # fmt: skip
def test_ragged_tokens_are_zeros(variant: tuple[str, ...], tokens: int) -> None:
    x, w, dy = tensors(tokens)
    padded = [torch.cat([t, torch.zeros(256 - tokens, t.shape[1], dtype=t.dtype)]) for t in (x, dy)]
    y, dx, dw = run(standalone(precision(*variant)), x, w, dy)
    y_padded, dx_padded, dw_padded = run(standalone(precision(*variant)), padded[0], w, padded[1])
    assert torch.equal(y, y_padded[:tokens])
    assert torch.equal(dx, dx_padded[:tokens])
    torch.testing.assert_close(dw, dw_padded, rtol=1e-5, atol=1e-6 * float(dw.abs().max()))


@pytest.mark.parametrize("variant", [("nvfp4",), ("quartet2",), ("mxfp4",)], ids=" ".join)
def test_ragged_tokens_with_random_bits(variant: tuple[str, ...]) -> None:
    assignment = precision(*variant)
    x, w, dy = tensors(100)
    found = run(standalone(assignment), x, w, dy)
    for one, exact in zip(found, expected(assignment, x, w, dy), strict=True):
        assert_rounded(one, exact)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    x, w, dy = tensors(32)
    for product in run(standalone(precision(name)), torch.zeros_like(x), w, torch.zeros_like(dy)):
        assert torch.equal(product, torch.zeros_like(product))
    y, dx, _ = run(standalone(precision(name)), x, torch.zeros_like(w), dy)
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.equal(dx, torch.zeros_like(dx))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_stays_visible(name: str, bad: float) -> None:
    x, w, dy = tensors(32)
    x[3, 5] = bad
    y, _, dw = run(standalone(precision(name)), x, w, dy)
    assert not y.isfinite().all()
    assert not dw.isfinite().all()
    x, w, dy = tensors(32)
    dy[3, 5] = bad
    _, dx, dw = run(standalone(precision(name)), x, w, dy)
    assert not dx.isfinite().all()
    assert not dw.isfinite().all()


@pytest.mark.parametrize("size", [1e-36, 1e30])
@pytest.mark.parametrize("name", NAMES)
def test_sizes_at_the_ends_of_the_range(name: str, size: float) -> None:
    x, w, dy = tensors(32)
    x = (x.float() * size).bfloat16()
    y, _, dw = run(standalone(precision(name)), x, w, dy)
    assert y.isfinite().all()
    assert dw.isfinite().all()


def test_random_bits_follow_what_they_should() -> None:
    x, w, dy = tensors()

    def gradients(linear: str = "layer", seed: int = 5, step: int = 1, microbatch: int = 0) -> torch.Tensor:
        gemms = standalone(precision("nvfp4", linear=linear), seed=seed)
        gemms.runtime.begin_step(step, Passes())
        gemms.runtime.begin_microbatch(microbatch)
        return torch.cat([product.float().flatten() for product in run(gemms, x, w, dy)[1:]])

    first = gradients()
    assert torch.equal(first, gradients())
    for other in (gradients("other"), gradients(seed=6), gradients(step=2), gradients(microbatch=1)):
        assert not torch.equal(first, other)


def test_a_backward_pass_uses_the_micro_batch_of_its_forward_pass() -> None:
    x, w, dy = tensors()
    gemms = standalone(precision("nvfp4"))
    _, dx, dw = run(gemms, x, w, dy)
    call = gemms.runtime.call()
    _, kept = gemms.forward(x, w, None, call)
    gemms.runtime.begin_microbatch(1)
    along_out, along_tokens = gemms.gradients(dy, call, True, True)
    assert along_out is not None
    assert along_tokens is not None
    assert torch.equal(dx, gemms.input_gradient(along_out, w, call))
    assert torch.equal(dw, gemms.weight_gradient(along_tokens, kept, call, None))


def test_stochastic_gradients_are_unbiased() -> None:
    assignment = precision("nvfp4", sizes=(64, 64))
    x, w, dy = tensors(64, (64, 64))
    gemms, exact = standalone(assignment), dy.double().t() @ x.double()
    draws = 100
    mean = torch.zeros_like(exact)
    for microbatch in range(draws):
        gemms.runtime.begin_microbatch(microbatch)
        mean += run(gemms, x, w, dy)[2].double() / draws
    one = (run(gemms, x, w, dy)[2].double() - exact).norm() / exact.norm()
    nearest = standalone(precision("nvfp4", "gradient_rounding=nearest", sizes=(64, 64)))
    floor = (run(nearest, x, w, dy)[2].double() - exact).norm() / exact.norm()
    averaged = (mean - exact).norm() / exact.norm()
    assert float(averaged) < 0.8 * float(floor)  # what is left is X's own rounding, which averaging cannot remove
    assert float(averaged) < 0.7 * float(one)


def test_evaluation_rounds_to_nearest() -> None:
    assignment = precision("nvfp4")
    stochastic = Operand("nvfp4", tile=(1, 16), rounding="stochastic")
    odd = replace(assignment, fprop=Fprop(stochastic, assignment.operands["fprop"]["weight"]))
    x, w, dy = tensors()
    gemms, plain = standalone(odd), standalone(assignment)
    with gemms.runtime.evaluating():
        y, _ = gemms.forward(x, w, None, gemms.runtime.call())
    assert torch.equal(y, run(plain, x, w, dy)[0])
    assert not torch.equal(y, run(gemms, x, w, dy)[0])


@pytest.mark.parametrize("name", ["nvfp4", "quartet2", "fp8_current", "nvfp4_fwd_bf16_bwd"])
def test_phases_switch_passes(name: str) -> None:
    x, w, dy = tensors()
    gemms = standalone(precision(name))
    recipe, plain = run(gemms, x, w, dy), run(standalone(precision("bf16")), x, w, dy)

    gemms.runtime.begin_step(1, Passes("recipe", "bf16"))
    gemms.runtime.begin_microbatch(0)
    y, dx, dw = run(gemms, x, w, dy)
    assert torch.equal(y, recipe[0])
    assert torch.equal(dx, plain[1])
    assert torch.equal(dw, plain[2])

    gemms.runtime.begin_step(1, Passes("bf16", "recipe"))
    gemms.runtime.begin_microbatch(0)
    y, dx, dw = run(gemms, x, w, dy)
    assert torch.equal(y, plain[0])
    if name != "nvfp4_fwd_bf16_bwd":  # with nothing decoded forward, its backward pass is plain BF16
        assert not torch.equal(dw, plain[2])
    else:
        assert torch.equal(dx, plain[1])
        assert torch.equal(dw, plain[2])


def test_one_copy_of_the_input_serves_whole_tensor_formats() -> None:
    gemms = standalone(precision("fp8_current"))
    x, w, _ = tensors()
    _, kept = gemms.forward(x, w, None, gemms.runtime.call())
    assert kept.format == "fp8_current"
    gemms = standalone(precision("nvfp4"))
    _, kept = gemms.forward(x, w, None, gemms.runtime.call())
    assert kept.values is x
