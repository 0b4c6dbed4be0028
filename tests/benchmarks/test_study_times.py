"""Step times of the study's rows."""

from pathlib import Path

import pytest

from nvfp4_train.compose import compose
from tests.benchmarks.study import times
from tests.benchmarks.study.cells import rows

TINY = (
    "experiment=quickstart", "model.pattern=M-", "data.sequence_length=64", "data.global_batch=2", "data.micro_batch=2",
)  # fmt: skip


def test_rows_that_change_during_a_run_have_no_step_time() -> None:
    timed = times.configurations(rows({5: 0.006}))
    every = [row.name for row in rows({5: 0.006})]
    assert [name for name in every if name not in timed] == [
        "nvfp4, late forward", "nvfp4, late backward", "nvfp4, late both", "4/6 late", "quartet2 late",
        "4/6 sensitive late",
    ]  # fmt: skip
    assert timed["nvfp4, no rotation"].precision.rotation is None


def test_each_row_steps_by_turns_with_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "PAIRS", 3)
    configs = {name: compose([*TINY, f"precision={name}"]) for name in ("bf16", "nvfp4")}
    found = list(times.measure(configs))
    assert [name for name, _, _ in found] == ["bf16", "nvfp4"]
    assert all(milliseconds > 0 and ratio > 0 for _, milliseconds, ratio in found)


def test_times_come_back_as_they_were_kept(tmp_path: Path) -> None:
    assert times.read(tmp_path) == {}
    kept = {"bf16": (32.0, 1.0), "nvfp4, no rotation": (36.25, 1.133)}
    (tmp_path / times.FILE).write_text(times.to_csv(kept))
    assert times.read(tmp_path) == kept
