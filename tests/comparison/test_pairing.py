"""What makes two runs a pair, and what is said when they are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvfp4_train.comparison.pairing import config_reasons, pair_up, unpaired_reasons
from nvfp4_train.comparison.runs import CompareError, open_group, open_run
from tests.comparison.synthetic import config, make_run

VALUES = np.array([4.0, 3.0, 2.0])


def reasons(folder: Path, baseline: dict[str, Any], run: dict[str, Any]) -> list[str]:
    first = make_run(folder / "base", VALUES, **baseline)
    second = make_run(folder / "other", run.pop("values", VALUES), **run)
    return unpaired_reasons(open_run(first), open_run(second))


def test_a_pair(tmp_path: Path) -> None:
    other = config(precision={"name": "fp8_block"}, optimizer={"lr": 3.0}, run_dir="x")
    assert reasons(tmp_path, {"settings": config()}, {"settings": other, "values": VALUES[:2]}) == []


@pytest.mark.parametrize(
    ("baseline", "run", "said"),
    [
        ({"settings": config(1)}, {"settings": config(2)}, ["seed differs: 1 and 2"]),
        (
            {"settings": config()},
            {"settings": config(model={"pattern": "M-M*", "hidden_size": 256})},
            ["model.hidden_size differs: 128 and 256"],
        ),
        ({"settings": config()}, {}, ["other has no config.yaml, so its seed and model are unknown"]),
        ({"settings": config()}, {"settings": {"seed": 1}}, ["model is not in the run's config.yaml"]),
        (
            {"settings": config()},
            {"settings": config(), "hashes": False},
            ["other has no data/hash at 3 of 3 common steps"],
        ),
        (
            {"settings": config()},
            {"settings": config(), "batch_seed": 5},
            ["the batches (data/hash) differ at 3 of 3 common steps, first at step 1"],
        ),
        (
            {"settings": config()},
            {"settings": config(), "tokens_per_step": 100},
            ["tokens differ from step 1 on: 4096 and 100"],
        ),
        ({"settings": config()}, {"settings": config(), "first_step": 7}, ["no step is in both runs"]),
    ],
)
def test_reasons(tmp_path: Path, baseline: dict[str, Any], run: dict[str, Any], said: list[str]) -> None:
    assert reasons(tmp_path, dict(baseline), dict(run)) == said


def test_one_batch_that_differs_is_enough(tmp_path: Path) -> None:
    changed = {2: {"data/hash": "another"}}
    found = reasons(tmp_path, {"settings": config()}, {"settings": config(), "extra": changed})
    assert found == ["the batches (data/hash) differ at 1 of 3 common steps, first at step 2"]


def test_how_the_same_model_is_computed_does_not_matter() -> None:
    one = {"seed": 1, "model": {"pattern": "M-", "recompute": False, "kernels": "auto"}}
    other = {"seed": 1, "model": {"pattern": "M-", "recompute": True, "kernels": "pytorch"}}
    assert config_reasons(one, other) == []


def test_seeds_pair_by_number(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        make_run(tmp_path / "base" / f"b{seed}", VALUES, settings=config(seed))
    for seed in (4, 3, 1):
        make_run(tmp_path / "runs" / f"r{seed}", VALUES, settings=config(seed, precision={"name": "mxfp4"}))
    pairs, notes = pair_up(open_group(str(tmp_path / "base")), open_group(str(tmp_path / "runs")))
    assert [(first.name, second.name) for first, second in pairs] == [("b1", "r1"), ("b3", "r3")]
    assert notes == ["b2 (seed 2) has no partner and is left out", "r4 (seed 4) has no partner and is left out"]


def test_no_seed_in_common(tmp_path: Path) -> None:
    for seed in (1, 2):
        make_run(tmp_path / "base" / f"b{seed}", VALUES, settings=config(seed))
    make_run(tmp_path / "run", VALUES, settings=config(7))
    with pytest.raises(CompareError, match="base has seeds 1, 2 and run has 7"):
        pair_up(open_group(str(tmp_path / "base")), open_group(str(tmp_path / "run")))
