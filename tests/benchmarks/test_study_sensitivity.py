"""Sensitivity of blocks: the losses that `evaluate` finds, from one model whose linears change their precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nvfp4_train.config import ConfigError
from nvfp4_train.evaluate import choose_checkpoint, score
from nvfp4_train.precision.recipes import standard_gemms
from nvfp4_train.trainer import train
from tests.benchmarks.study import sensitivity
from tests.benchmarks.study.sensitivity import block_alone, measure
from tests.trainer.conftest import Make, make, prepared, text  # noqa: F401 (fixtures)


def silent(line: str) -> None:
    """For tests that do not look at the lines."""


def test_each_block_alone_costs_what_evaluate_says(make: Make, tmp_path: Path) -> None:  # noqa: F811
    config = make("bf16", "steps=3", "checkpoint.every=0")
    train(config)
    run = tmp_path / "run"
    found = measure(run, "nvfp4", 3, silent)
    assert list(found) == [0, 1, 2, 3]
    assert all(difference != 0 for difference in found.values())
    recipe = make("nvfp4").precision
    alone = replace(config, precision=block_alone(recipe, 2))
    path = choose_checkpoint(run, None, silent)
    expected = score(alone, path, silent)["val/loss"] - score(config, path, silent)["val/loss"]
    assert found[2] == pytest.approx(expected, abs=1e-9)
    table = sensitivity.to_csv(found, "M-*-", "nvfp4")
    (tmp_path / sensitivity.FILE).write_text(table)
    assert sensitivity.read(tmp_path) == pytest.approx(found, abs=1e-6)
    assert sensitivity.read(run) == {}


def test_a_run_in_another_recipe_says_nothing_about_blocks(make: Make, tmp_path: Path) -> None:  # noqa: F811
    train(make("fp8_block", "steps=2", "evaluation.every=0"))
    with pytest.raises(ConfigError, match="was trained in fp8_block; sensitivity is measured on a BF16 run"):
        measure(tmp_path / "run", "nvfp4", 3, silent)


def test_one_block_is_in_the_recipe_and_nothing_else(make: Make) -> None:  # noqa: F811
    from models.shapes import linear_shapes
    from nvfp4_train.precision.assignment import assign

    config = make("nemotron3_super")
    found = assign(block_alone(config.precision, 2), linear_shapes(config.model))
    quantized = {linear.name for linear in found if linear.format != "bf16"}
    assert quantized == {f"decoder.layers.2.self_attention.linear_{name}" for name in ("qkv", "proj")}
    assert {linear.fprop for linear in found if linear.block == 2} == {standard_gemms("nvfp4").fprop}
