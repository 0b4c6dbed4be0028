"""A second start in a run folder: the same run goes on, another is refused, a branch is marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.config import SourceConfig
from nvfp4_train.checkpoints.files import CheckpointError
from nvfp4_train.compose import compose
from nvfp4_train.config import RunConfig
from nvfp4_train.run_records import load_config, read_branch
from tests.config.run_folders import checkpoint, refused, start

pytestmark = pytest.mark.usefixtures("unlocked")


def test_the_same_command_goes_on(base: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start(base, run_dir=str(run)).decision == "fresh"
    newest = checkpoint(run, 10)
    folder = start(base, run_dir=str(run))
    assert (folder.decision, folder.step, folder.checkpoint, folder.notes) == ("resume", 10, newest, ())
    starts = json.loads((run / "environment.json").read_text())["starts"]
    assert [(entry["decision"], entry["step"]) for entry in starts] == [("fresh", 0), ("resume", 10)]


def test_what_may_differ_is_said_line_by_line(base: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(base, run_dir=str(run))
    checkpoint(run, 10)
    changes = {
        "checkpoint.every": 7,
        "logging.wandb": "offline",
        "stop_after": 15,
        "parallel.tensor": 2,
        "evaluation.every": 3,
        "debug.profile": 2,
        "model.recompute": "full",
        "precision.backend": "emulated",
    }
    folder = start(base, run_dir=str(run), **changes)
    assert folder.decision == "resume"
    assert len(folder.notes) == len(changes)
    said = "\n".join(folder.notes)
    assert f"checkpoint.every was {base.checkpoint.every}, is 7 from here on" in said
    assert "stop_after was null (nothing), is 15 from here on" in said
    assert all(key in said for key in changes)
    assert load_config(run).checkpoint.every == 7


def test_another_recipe_is_one_line(base: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(base, run_dir=str(run))
    checkpoint(run, 10)
    folder = start(compose(["steps=20", "precision=bf16", f"run_dir={run}"]))
    assert (folder.decision, folder.notes) == ("resume", ("precision was 'nvfp4', is 'bf16' from here on",))


@pytest.mark.parametrize(
    ("key", "value", "old"),
    [
        ("model.hidden_size", 256, "128"),
        ("data.path", "/other", "builtin"),
        ("data.global_batch", 32, "16"),
        ("seed", 2, "1"),
        ("optimizer.lr", 1e-5, "0.003"),
        ("schedule.decay", 0.5, "0.2"),
        ("steps", 40, "20"),
    ],
)
def test_what_makes_the_run_may_not_differ(base: RunConfig, tmp_path: Path, key: str, value: Any, old: str) -> None:
    run = tmp_path / "run"
    start(base, run_dir=str(run))
    checkpoint(run, 10)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    message = refused(base, run_dir=str(run), **{key: value})
    assert key in message
    assert old in message
    assert str(value) in message
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_all_keys_that_differ_are_named_at_once(base: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(base, run_dir=str(run))
    checkpoint(run, 10)
    message = refused(base, run_dir=str(run), seed=2, steps=30, **{"optimizer.clip": 2.0})
    assert all(key in message for key in ("seed: 1 there, 2 here", "steps: 20 there, 30 here", "optimizer.clip"))


def test_of_a_list_the_item_that_differs_is_named(base: RunConfig, tmp_path: Path) -> None:
    """Of the whole list only the beginning would be shown, which is the same."""
    run, web = tmp_path / "run", SourceConfig("web", "w" * 200)
    start(base, run_dir=str(run), **{"data.path": None, "data.sources": (web, SourceConfig("code", "c"))})
    checkpoint(run, 10)
    message = refused(base, run_dir=str(run), **{"data.path": None, "data.sources": (web, SourceConfig("code", "d"))})
    assert "\n  data.sources[1].path: 'c' there, 'd' here\n" in message


def test_a_run_that_came_to_no_step_may_be_mended(base: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(base, run_dir=str(run), **{"data.path": "/typo"})
    folder = start(base, run_dir=str(run))
    assert folder.decision == "fresh"
    assert load_config(run).data.path == "builtin"


def test_steps_without_a_checkpoint_begin_again(base: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(base, run_dir=str(run))
    assert start(base, run_dir=str(run)).announcement() == f"run folder {run}: a new run"
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    again = start(base, run_dir=str(run))
    assert again.decision == "fresh"
    assert again.announcement() == (
        f"run folder {run}: a new run, once more, for it has no checkpoint: the steps in its metrics.jsonl are trained "
        "again"
    )
    assert "seed" in refused(base, run_dir=str(run), seed=9)


def test_never(base: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start(base, run_dir=str(run), resume="never").decision == "fresh"
    checkpoint(run, 10)
    assert "resume=never" in refused(base, run_dir=str(run), resume="never")
    assert start(base, run_dir=str(run)).decision == "resume"


def test_a_damaged_checkpoint_is_passed_over_and_named(base: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(base, run_dir=str(run))
    checkpoint(run, 5)
    bad = checkpoint(run, 10)
    (bad / "__0_0.distcp").write_bytes(b"weigh")
    folder = start(base, run_dir=str(run))
    assert folder.step == 5
    assert any("__0_0.distcp" in note for note in folder.notes)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        start(base, run_dir=str(tmp_path / "branch"), resume=str(bad))


def test_a_branch_is_marked(base: RunConfig, tmp_path: Path) -> None:
    parent = start(base, run_dir=str(tmp_path / "parent")).path
    older, newest = checkpoint(parent, 5), checkpoint(parent, 10)
    for name, source, step, at in (("a", parent, 10, newest), ("b", older, 5, older)):
        changes = {"run_dir": str(tmp_path / name), "resume": str(source), "steps": 99, "seed": 3, "optimizer.lr": 1e-5}
        folder = start(base, **changes)
        assert (folder.decision, folder.step, folder.checkpoint) == ("branch", step, at)
        assert read_branch(folder.path) == {"run": str(parent), "checkpoint": str(at), "step": step}
        assert load_config(folder.path).resume == str(source)
        assert f"a branch from step {step}" in folder.announcement()
        assert start(base, **changes).decision == "branch", "before its first checkpoint it starts there again"
        checkpoint(folder.path, step + 1)
        again = start(base, **changes)
        assert (again.decision, again.step) == ("resume", step + 1)
        assert start(base, **{**changes, "resume": "auto"}).decision == "resume"
    assert read_branch(parent) is None


def test_branches_that_cannot_be(base: RunConfig, tmp_path: Path) -> None:
    parent = start(base, run_dir=str(tmp_path / "parent")).path
    assert "no checkpoint yet" in refused(base, run_dir=str(tmp_path / "a"), resume=str(parent))
    older = checkpoint(parent, 5)
    checkpoint(parent, 10)
    assert not (tmp_path / "a").exists(), "what was refused leaves nothing behind"
    message = refused(base, run_dir=str(tmp_path / "a"), resume=str(parent), **{"model.hidden_size": 256})
    assert "model.hidden_size: 128 there, 256 here" in message
    assert "no such folder" in refused(base, run_dir=str(tmp_path / "a"), resume=str(tmp_path / "nowhere"))
    assert "neither a run folder" in refused(base, run_dir=str(tmp_path / "a"), resume=str(tmp_path))
    assert "does not go back" in refused(base, run_dir=str(parent), resume=str(older))
    other = start(base, run_dir=str(tmp_path / "other")).path
    checkpoint(other, 3)
    assert "no branch" in refused(base, run_dir=str(other), resume=str(parent))
