"""Files are whole or not there, whatever the disk says, and what it says becomes a way out."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from nvfp4_train import storage
from nvfp4_train.config import ConfigError
from nvfp4_train.storage import refusals_said, write_atomic


def failing(code: int) -> Any:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(("code", "way_out"), [(errno.ENOSPC, "Free some space"), (errno.EROFS, "another run_dir")])
def test_what_the_disk_refuses_is_said_and_leaves_the_file_before(
    code: int, way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    write_atomic(file, "old")
    monkeypatch.setattr(storage.os, "fsync", failing(code))
    with pytest.raises(ConfigError, match=way_out) as error, refusals_said(tmp_path):
        write_atomic(file, "new")
    assert str(error.value).startswith(f"{file}: {os.strerror(code)}.")
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == {"config.yaml": "old"}


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path) -> None:
    (tmp_path / ".config.yaml.tmp").write_text("half of a ver")
    write_atomic(tmp_path / "config.yaml", "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "new"


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "I/O error", "/run/x"), OSError(errno.ENOSPC, "full", "/elsewhere/x"), OSError("odd")]
)
def test_other_errors_stay_what_they_are(error: OSError) -> None:
    with pytest.raises(OSError, match=r"I/O|full|odd") as found, refusals_said(Path("/run")):
        raise error
    assert found.value is error
