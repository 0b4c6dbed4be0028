"""metrics.jsonl: whole lines, valid JSON, cut on resume."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from nvfp4_train import metrics
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
    with open(tmp_path / "m", "a", encoding="utf-8") as stream:
        stream.write('{"step": 8, "tok')
    assert file.cut_after(5) is None
    file.write({"step": 6, "again": True})
    lines = read_metrics(tmp_path / "m")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["again"] is True
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_cutting_what_is_not_there(tmp_path: Path) -> None:
    assert MetricsFile(tmp_path / "m").cut_after(0) is None
    assert not (tmp_path / "m").exists()
    assert f"{tmp_path / 'm'}: no line for step 3 to 5." in str(MetricsFile(tmp_path / "m").cut_after(5, first=3))


def test_only_what_cannot_be_read_goes_and_what_is_lost_is_said(tmp_path: Path) -> None:
    write_steps(tmp_path / "m", range(1, 10))
    lines = (tmp_path / "m").read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:9] + b"\xff\x00" + lines[2][9:]
    lines[4] = b'{"step": 5, "tok' + lines[5]  # torn, and the next one written right behind it
    del lines[5]
    (tmp_path / "m").write_bytes(b"".join(lines))
    said = MetricsFile(tmp_path / "m").cut_after(8)
    assert said is not None
    assert said.startswith(f"{tmp_path / 'm'}: line 3, 5 can't be read and was dropped; no line for step 3, 5 to 6.")
    assert [line["step"] for line in read_metrics(tmp_path / "m")] == [1, 2, 4, 7, 8]


def test_a_last_line_that_lost_its_newline_alone_is_kept(tmp_path: Path) -> None:
    write_steps(tmp_path / "m", range(1, 4))
    content = (tmp_path / "m").read_bytes()
    (tmp_path / "m").write_bytes(content[:-1])
    assert MetricsFile(tmp_path / "m").cut_after(3) is None
    assert (tmp_path / "m").read_bytes() == content


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_steps(tmp_path / "m", range(1, 3))
    real = os.write
    monkeypatch.setattr(metrics.os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    with pytest.raises(OSError, match="No space left") as error:
        file.write({"step": 3, "tokens": 30, "train/loss": 1.5})
    monkeypatch.undo()
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(tmp_path / "m"))
    assert file.cut_after(2) is None
    assert [line["step"] for line in read_metrics(tmp_path / "m")] == [1, 2]
