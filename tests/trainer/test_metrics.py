"""metrics.jsonl: whole lines, valid JSON, cut on resume."""

from __future__ import annotations

import json
from pathlib import Path

from nvfp4_train.metrics import MetricsFile, read_metrics


def write_steps(path: Path, steps: range) -> MetricsFile:
    file = MetricsFile(path)
    for step in steps:
        file.write({"step": step, "tokens": 10 * step, "train/loss": 1.5})
    return file


def test_a_line_is_there_when_write_returns(tmp_path: Path) -> None:
    write_steps(tmp_path / "m", range(1, 3))
    assert (tmp_path / "m").read_text() == (
        '{"step": 1, "tokens": 10, "train/loss": 1.5}\n{"step": 2, "tokens": 20, "train/loss": 1.5}\n'
    )


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "m").write({"step": 1, "train/loss": float("nan"), "optim/grad_norm": float("inf")})
    text = (tmp_path / "m").read_text()
    assert json.loads(text, parse_constant=lambda word: 1 / 0) == {
        "step": 1,
        "train/loss": None,
        "optim/grad_norm": None,
    }


def test_resume_cuts_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    file = write_steps(tmp_path / "m", range(1, 8))
    with open(tmp_path / "m", "a") as stream:
        stream.write('{"step": 8, "tok')
    assert file.cut_after(5) == 3
    file.write({"step": 6, "again": True})
    lines = read_metrics(tmp_path / "m")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["again"] is True
    assert not list(tmp_path.glob("*.tmp"))


def test_cutting_what_is_not_there(tmp_path: Path) -> None:
    assert MetricsFile(tmp_path / "m").cut_after(5) == 0
