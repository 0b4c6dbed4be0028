"""Who multiplies a recipe: by recipe, compute capability, and what is installed."""

from __future__ import annotations

import pytest

from nvfp4_train.precision.assignment import assign
from nvfp4_train.precision.backends import Backend, TransformerEngine, choose_backend, native_formats, pair_problem
from nvfp4_train.precision.config import PrecisionConfig, PrecisionError

from .recipe_files import recipe, shapes

INSTALLED = TransformerEngine("2.20.2", None)
MISSING = TransformerEngine(None, None)
Capability = tuple[int, int] | None


def choose(config: PrecisionConfig, capability: Capability, engine: TransformerEngine = INSTALLED) -> Backend:
    return choose_backend(config, assign(config, shapes("M-*-M-*-")), capability, lambda: engine)


def refused(config: PrecisionConfig, capability: Capability, engine: TransformerEngine = INSTALLED) -> str:
    with pytest.raises(PrecisionError) as error:
        choose(config, capability, engine)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "capability", "chosen", "words"),
    [
        ("fp8_block", (9, 0), "native", "fp8_block on FP8 tensor cores"),
        ("fp8_current", (8, 9), "native", "fp8_current on FP8 tensor cores"),
        ("fp8_delayed", (10, 0), "native", "fp8_delayed on FP8 tensor cores"),
        ("fp8_block", (8, 9), "emulated", "needs compute capability 9.0, and this machine has 8.9"),
        ("fp8_block", (10, 0), "emulated", "no FP32 scales from 10.0 on"),
        ("nvfp4", (9, 0), "emulated", "nvfp4 needs compute capability 10.0, and this machine has 9.0"),
        ("nvfp4", (10, 0), "transformer_engine", "Transformer Engine 2.20.2"),
        ("nemotron3_super", (10, 3), "transformer_engine", "Transformer Engine 2.20.2"),
        ("mxfp8", (10, 0), "transformer_engine", "Transformer Engine 2.20.2"),
        ("quartet2", (10, 0), "emulated", "Quartet II"),
        ("mxfp4", (10, 0), "emulated", "cannot express mxfp4"),
        ("bf16", (9, 0), "native", "BF16 tensor cores"),
        ("nvfp4", None, "emulated", "no CUDA device"),
    ],
)
def test_auto_takes_what_the_hardware_has_and_says_why(
    name: str, capability: Capability, chosen: str, words: str
) -> None:
    backend, why = choose(recipe(name), capability)
    assert backend == chosen
    assert words in why


@pytest.mark.parametrize(
    ("name", "capability", "needed"),
    [
        ("fp8_delayed", (8, 0), "8.9"),
        ("fp8_block", (8, 9), "9.0"),
        ("fp8_block", (12, 0), "9.0"),
        ("mxfp8", (9, 0), "10.0"),
        ("nvfp4", (9, 0), "10.0"),
        ("nvfp4", None, "10.0"),
        ("nvfp4_fwd_bf16_bwd", (9, 0), "10.0"),
    ],
)
def test_a_refusal_names_both_compute_capabilities_and_what_runs(
    name: str, capability: Capability, needed: str
) -> None:
    message = refused(recipe(name, "backend=native"), capability)
    here = "no CUDA device" if capability is None else f"this machine has {capability[0]}.{capability[1]}"
    for part in (f"Recipe {name} cannot run natively", f"needs compute capability {needed}", here, "backend=emulated"):
        assert part in message
    runs_here = capability is not None and native_formats(capability)
    assert ("or a recipe that runs natively here" in message) == bool(runs_here)


def test_rules_are_counted() -> None:
    config = recipe("fp8_current", "backend=native", "rules=[{role: fc1, format: nvfp4}]")
    assert "nvfp4 needs compute capability 10.0, and this machine has 9.0" in refused(config, (9, 0))
    assert choose(recipe("fp8_current", "rules=[{role: fc1, format: nvfp4}]"), (9, 0)).name == "emulated"
    assert choose(recipe("fp8_current", "rules=[{role: fc1, format: fp8_block}]"), (9, 0)).name == "native"


def test_an_engine_that_is_missing_or_broken() -> None:
    native = recipe("nvfp4", "backend=native")
    assert "Transformer Engine is not installed (pip install" in refused(native, (10, 0), MISSING)
    broken = TransformerEngine("2.20.2", "OSError: libcudnn.so.9: cannot open shared object file")
    message = refused(native, (10, 0), broken)
    assert "Transformer Engine 2.20.2 cannot be imported: OSError: libcudnn.so.9: cannot open" in message
    assert "precision.backend=emulated" in message
    assert choose(recipe("nvfp4"), (10, 0), broken).name == "emulated"


def test_the_engine_by_name_runs_fp8_too() -> None:
    assert choose(recipe("fp8_block", "backend=transformer_engine"), (9, 0)).name == "transformer_engine"
    message = refused(recipe("fp8_block", "backend=transformer_engine"), (9, 0), MISSING)
    assert message.startswith("Recipe fp8_block cannot run through Transformer Engine: Transformer Engine is not")
    assert "cannot express" in refused(recipe("quartet2", "backend=transformer_engine"), (10, 0))


def test_an_engine_that_is_not_needed_is_not_looked_for() -> None:
    def find() -> TransformerEngine:
        raise AssertionError("importing it takes seconds")

    for name, backend in (("fp8_block", "auto"), ("fp8_block", "native"), ("nvfp4", "auto"), ("nvfp4", "emulated")):
        choose_backend(recipe(name, f"backend={backend}"), [], (9, 0), find)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("fp8_current", "fprop.input.element=e5m2", "fprop.weight.element=e5m2"), "E5M2 by E4M3 alone"),
        (("fp8_block", "fprop.input.tile=[128, 128]"), "one of the two must have blocks of 1x128"),
        (("fp8_block", "wgrad.input.format=bf16", "wgrad.input.tile=null"), "operands of one format"),
        (("fp8_block", "dgrad.weight.source=decoded"), "decoded operands"),
    ],
)
def test_pairs_that_tensor_cores_do_not_multiply(overrides: tuple[str, ...], words: str) -> None:
    config = recipe(*overrides)
    assert words in str(pair_problem(config))
    assert choose(config, (9, 0)).name == "emulated"


def test_a_way_of_emulation_is_no_backend_of_its_own() -> None:
    config = recipe("fp8_block", "gemm=bf16_scaled")
    assert choose(config, (9, 0)) == ("emulated", "as precision.gemm=bf16_scaled asks")
    message = refused(recipe("fp8_block", "gemm=bf16_scaled", "backend=native"), (9, 0))
    assert "precision.gemm=bf16_scaled is a way of emulation" in message
    assert "precision.backend=emulated, or precision.gemm=exact" in message


def test_blackwell_has_no_fp32_block_scales() -> None:
    assert native_formats((9, 0)) == ["bf16", "fp8_current", "fp8_delayed", "fp8_block"]
    assert native_formats((10, 0)) == ["bf16", "fp8_current", "fp8_delayed", "mxfp8", "nvfp4"]
    assert native_formats(None) == []
