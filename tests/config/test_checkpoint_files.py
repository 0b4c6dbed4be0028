"""Which checkpoints stay, which are found, and what is left by a kill at any moment. No weights, no torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nvfp4_train.checkpoints.files import CheckpointError, damage, drop_old, newest_whole, remove_temporary, saved_steps
from tests.config.run_folders import checkpoint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the checkpoints of a run in `tmp_path` are."""
    return tmp_path / "checkpoints"


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (0, 0, [1, 2, 3, 4, 5, 6, 7]),
        (0, 3, [1, 2, 3, 4, 5, 6, 7]),
        (2, 0, [6, 7]),
        (1, 3, [3, 6, 7]),
        (9, 3, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_newest_stay_and_some_for_good(
    keep: int, keep_every: int, left: list[int], root: Path, tmp_path: Path
) -> None:
    for step in range(1, 8):
        checkpoint(tmp_path, step)
    drop_old(root, keep, keep_every)
    assert saved_steps(root) == left
    assert newest_whole(root) == (root / "step-00000007", [])


def test_what_a_process_started_from_stays(root: Path, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    drop_old(root, keep=1, spared=[root / "step-00000001"])
    assert saved_steps(root) == [1, 3]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_stays_where_damaged_ones_are_newer(keep: int, root: Path, tmp_path: Path) -> None:
    """A run that fell back from step 300 to step 100 saves at step 150."""
    for step in (50, 100, 200, 300, 150):
        checkpoint(tmp_path, step)
    drop_old(root, keep)
    assert saved_steps(root) == [100, 150, 200, 300][2 - keep :]
    assert newest_whole(root) == (root / "step-00000150", [])


def test_a_removal_that_is_cut_off_leaves_no_half_checkpoint(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)

    def killed(path: Path, **_: Any) -> None:
        (path / "__0_0.distcp").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            drop_old(root, keep=1)
    assert saved_steps(root) == [1, 3]
    assert [damage(root / f"step-0000000{step}") for step in (1, 3)] == [None, None]
    remove_temporary(root)
    assert sorted(entry.name for entry in root.iterdir()) == ["latest", "step-00000001", "step-00000003"]


def test_a_renamed_checkpoint_is_none(root: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path, 1).rename(root / "step-00000002")
    (root / "latest").write_text("step-00000002\n")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is of step 1: the folder was renamed"):
        newest_whole(root)


def test_an_unreadable_latest_hides_nothing(root: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    (root / "latest").write_bytes(b"\xff\xfe")
    assert newest_whole(root) == (root / "step-00000001", [])
