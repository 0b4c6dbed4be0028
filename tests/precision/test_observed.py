"""What was meant to run and what ran: a difference stops the run."""

from __future__ import annotations

import pytest

from nvfp4_train.precision.config import PrecisionError
from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.runtime import PrecisionRuntime
from nvfp4_train.precision.three_gemms import ThreeGemms

from .linears import RECIPE, precision, run, standalone, tensors
from .recipe_files import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_observed_equals_meant(name: str) -> None:
    assignment = precision(name)
    gemms = standalone(assignment)
    for microbatch in range(2):
        gemms.runtime.begin_microbatch(microbatch)
        run(gemms, *tensors())
    gemms.runtime.check_observed([assignment], RECIPE)
    formats = assignment.gemm_formats
    assert gemms.runtime.observed() == {"layer": {gemm: {formats[gemm]: 2} for gemm in formats}}


def test_recompute_counts_once() -> None:
    assignment = precision("nvfp4")
    gemms = standalone(assignment)
    run(gemms, *tensors())
    run(gemms, *tensors())
    gemms.runtime.check_observed([assignment], RECIPE)
    assert gemms.runtime.observed()["layer"]["fprop"] == {"nvfp4": 1}


def test_a_gemm_in_another_format_is_found() -> None:
    meant = precision("nvfp4")
    gemms = standalone(precision("nvfp4_fwd_bf16_bwd"))
    run(gemms, *tensors())
    with pytest.raises(PrecisionError, match="2 GEMMs did not run") as found:
        gemms.runtime.check_observed([meant], RECIPE)
    assert "layer dgrad: meant nvfp4, ran bf16 in 1 of 1 micro-batches" in str(found.value)
    assert "layer fprop" not in str(found.value)


def test_a_pass_in_another_phase_is_found() -> None:
    assignment = precision("nvfp4")
    gemms = standalone(assignment)
    run(gemms, *tensors())
    with pytest.raises(PrecisionError, match="layer fprop: meant bf16, ran nvfp4"):
        gemms.runtime.check_observed([assignment], Passes("bf16", "recipe"))


def test_codes_are_what_a_native_gemm_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values in place of codes have the same numbers, and are found nevertheless."""
    assignment = precision("fp8_current")
    gemms = standalone(assignment, native=True)
    monkeypatch.setattr(gemms, "_native", set())
    run(gemms, *tensors())
    with pytest.raises(PrecisionError, match="layer wgrad: meant fp8_current, ran fp8_current, emulated in 1 of 1"):
        gemms.runtime.check_observed([assignment], RECIPE)


def test_a_linear_that_did_not_run_is_found() -> None:
    assignment = precision("nvfp4")
    gemms = standalone(assignment)
    run(gemms, *tensors())
    gemms.runtime.begin_microbatch(1)
    with pytest.raises(PrecisionError, match="layer wgrad: meant nvfp4, ran nvfp4 in 1 of 2 micro-batches"):
        gemms.runtime.check_observed([assignment], RECIPE)
    untouched = standalone(assignment)
    with pytest.raises(PrecisionError, match="layer fprop: meant nvfp4, ran nothing of 1 micro-batches"):
        untouched.runtime.check_observed([assignment], RECIPE)


def test_other_stages_linears_are_passed_over() -> None:
    assignment = precision("nvfp4")
    gemms = standalone(assignment)
    run(gemms, *tensors())
    gemms.runtime.check_observed([assignment, precision("bf16", linear="of_another_stage")], RECIPE)


def test_first_step_of_each_phase_is_observed() -> None:
    assignment = precision("nvfp4")
    gemms = standalone(assignment)
    runtime: PrecisionRuntime = gemms.runtime
    run(gemms, *tensors())
    seen = []
    for step, passes in enumerate((RECIPE, RECIPE, Passes("bf16", "recipe"), Passes("bf16", "recipe")), start=1):
        runtime.begin_step(step, passes)
        runtime.begin_microbatch(0)
        run(gemms, *tensors())
        seen.append(runtime.observing)
        runtime.check_observed([assignment], passes)
        runtime.end_step()
    assert seen == [False, False, True, False]  # the first one of all was begun by `standalone`
    assert runtime.observed()["layer"]["fprop"] == {"bf16": 1}


def test_evaluation_is_not_counted() -> None:
    gemms: ThreeGemms = standalone(precision("nvfp4"))
    x, w, _ = tensors()
    with gemms.runtime.evaluating(bf16=True):
        gemms.forward(x, w, None, gemms.runtime.call())
    assert gemms.runtime.observed() == {"layer": {}}
