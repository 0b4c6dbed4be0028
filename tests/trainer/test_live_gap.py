"""`baseline=RUN_DIR`: the gap is logged while the run goes on, and says what `compare` says in the end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nvfp4_train import compare
from nvfp4_train.comparison.runs import CompareError
from nvfp4_train.exits import ExitCode
from nvfp4_train.metrics import read_metrics
from nvfp4_train.trainer import train
from tests.trainer.conftest import Make


def test_live_gap_is_the_gap_of_the_comparison(make: Make, tmp_path: Path) -> None:
    baseline = make("bf16", "steps=10", run="baseline")
    assert train(baseline) == ExitCode.DONE
    run = replace(make("nvfp4", "steps=10", "checkpoint.every=4", run="run"), baseline=baseline.run_dir)
    assert train(replace(run, stop_after=6)) == ExitCode.DONE  # goes on from step 4
    assert train(run) == ExitCode.DONE
    lines = read_metrics(Path(str(run.run_dir)) / "metrics.jsonl")
    assert all("gap/train" in line for line in lines)
    assert "gap/val" in lines[-1]
    out = tmp_path / "out"
    assert compare.main([str(baseline.run_dir), str(run.run_dir), "--out", str(out)]) == 0
    gap = json.loads((out / "compare.json").read_text())["runs"][0]["gap"]
    assert lines[-1]["gap/train"] == pytest.approx(gap["train"]["value"], rel=1e-9)
    assert lines[-1]["gap/val"] == pytest.approx(gap["val"]["value"], rel=1e-9)
    assert lines[-1]["gap/train"] != 0


def test_another_seed_is_said_and_a_folder_without_metrics_refused(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = make("bf16", "steps=2", run="baseline")
    assert train(baseline) == ExitCode.DONE
    capsys.readouterr()
    run = replace(make("bf16", "steps=1", "seed=2", run="run"), baseline=baseline.run_dir)
    assert train(run) == ExitCode.DONE
    assert "not paired with the baseline" in capsys.readouterr().out
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CompareError, match=r"metrics\.jsonl"):
        train(replace(make("bf16", "steps=1", run="other"), baseline=str(empty)))
