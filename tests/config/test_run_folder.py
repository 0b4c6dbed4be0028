"""Run folders: one for each run, continued by the same run alone, branched with a mark, never overwritten."""

from __future__ import annotations

import errno
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvfp4_train import run_folder
from nvfp4_train.checkpoints.files import CheckpointError
from nvfp4_train.compose import compose
from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.run_folder import prepare_run_folder, recipe_of, release_locks
from nvfp4_train.run_records import load_config, read_branch
from tests.config.run_folders import ENVIRONMENT, checkpoint, refused, start

pytestmark = pytest.mark.usefixtures("unlocked")


def test_a_new_folder_says_what_it_is(base: RunConfig, tmp_path: Path) -> None:
    folder = prepare_run_folder(base)
    said = folder.record(ENVIRONMENT, {"recipe": "nvfp4"})
    assert folder.path.parent == tmp_path / "runs"
    assert folder.path.name.startswith("quickstart-nvfp4-20")
    assert (folder.decision, folder.step, folder.checkpoint) == ("fresh", 0, None)
    assert folder.config.run_dir == str(folder.path)
    assert load_config(folder.path) == folder.config
    environment = json.loads((folder.path / "environment.json").read_text())
    assert {key: environment[key] for key in ENVIRONMENT} == ENVIRONMENT
    assert [entry["decision"] for entry in environment["starts"]] == ["fresh"]
    assert json.loads((folder.path / "precision.json").read_text()) == {"recipe": "nvfp4"}
    assert f"run_dir: {folder.path}" in said
    assert "a new run" in folder.announcement()


def test_two_jobs_in_one_second_never_share(base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda *_: "20260101-120000")
    tokens = iter(["aaaa", "aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr(run_folder.secrets, "token_hex", lambda _: next(tokens))
    names = [start(base).path.name for _ in range(2)]
    assert names == ["quickstart-nvfp4-20260101-120000-aaaa", "quickstart-nvfp4-20260101-120000-bbbb"]


def test_ranks_share_the_main_ranks_folder(base: RunConfig, tmp_path: Path) -> None:
    sent: list[Any] = []

    def main_sends(item: Any) -> Any:
        sent.append(pickle.loads(pickle.dumps(item)))
        return item

    main = prepare_run_folder(base, True, main_sends)
    other = prepare_run_folder(base, False, lambda item: sent[0])
    assert other == main
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_refusal_reaches_every_rank(base: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").write_text("years of work")
    sent: list[Any] = []
    from dataclasses import replace

    config = replace(base, run_dir=str(tmp_path / "used"))
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        prepare_run_folder(config, True, lambda item: sent.append(item) or item)
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        prepare_run_folder(config, False, lambda item: sent[0])
    assert (tmp_path / "used" / "thesis.tex").read_text() == "years of work"
    assert [entry.name for entry in (tmp_path / "used").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("foreign", ["defaults:\n  - model: resnet\n", "- a list\n", "", "a: [\n"])
def test_a_config_of_another_program_makes_no_run(base: RunConfig, tmp_path: Path, foreign: str) -> None:
    used = tmp_path / "project"
    used.mkdir()
    (used / "config.yaml").write_text(foreign)
    text = refused(base, run_dir=str(used))
    assert "is not empty (config.yaml) and holds no run (config.yaml is of no run)" in text
    assert "Nothing there is overwritten" in text
    assert {entry.name: entry.read_text() for entry in used.iterdir()} == {"config.yaml": foreign}


def test_a_file_or_an_unwritable_place_is_refused(base: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(base, run_dir=str(tmp_path / "file"))
    assert str(tmp_path / "file") in refused(base, run_dir=str(tmp_path / "file" / "below"))


def test_a_running_folder_is_locked(base: RunConfig, tmp_path: Path) -> None:
    from dataclasses import replace

    config = replace(base, run_dir=str(tmp_path / "run"))
    prepare_run_folder(config)
    code = (
        "from pathlib import Path\nfrom nvfp4_train.run_folder import ConfigError, _lock\n"
        f"try:\n    _lock(Path({config.run_dir!r}))\nexcept ConfigError as error:\n    print(error)"
    )
    command = [sys.executable, "-c", code]
    assert "another process" in subprocess.run(command, capture_output=True, text=True).stdout
    release_locks()
    assert subprocess.run(command, capture_output=True, text=True).stdout == ""


def test_a_damaged_configuration_is_named(base: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(base, run_dir=str(run))
    checkpoint(run, 10)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("hidden_size", "hiden_size"))
    assert str(run / "config.yaml") in refused(base, run_dir=str(run))
    for content, said in (("a: 1\nb: [", "is damaged at line 2"), ("", "holds no keys"), ("\xff: \x00", "is damaged")):
        (run / "config.yaml").write_bytes(content.encode("latin-1"))
        message = refused(base, run_dir=str(run))
        assert message.startswith(f"{run / 'config.yaml'}: {said}") or said in message
        assert "--cfg job" in message
    (run / "config.yaml").unlink()
    assert "restore config.yaml" in refused(base, run_dir=str(run))
    with pytest.raises(ConfigError, match=r"nowhere: is no run folder.* run_dir, by default runs/"):
        load_config(tmp_path / "nowhere")


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"stop_after": 12}])
def test_a_start_without_a_step_to_take_writes_nothing(
    base: RunConfig, tmp_path: Path, changes: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    start(base, run_dir=str(run))
    checkpoint(run, 12 if "stop_after" in changes else 20)
    before = contents(run)
    config = compose(["steps=20", f"run_dir={run}", *(f"{key}={value}" for key, value in changes.items())])
    said = start(config).nothing_to_do()
    assert said is not None
    assert ("stopped after step 12, as asked" if "stop_after" in changes else "complete: 20 of 20 steps") in said
    assert ("not taken over: precision was 'nvfp4', is 'bf16'" in said) == ("precision" in changes)
    assert contents(run) == before


def test_a_branch_that_starts_at_its_end_is_refused(base: RunConfig, tmp_path: Path) -> None:
    parent = start(base, run_dir=str(tmp_path / "parent")).path
    checkpoint(parent, 6)
    message = refused(base, run_dir=str(tmp_path / "deep" / "branch"), resume=str(parent), steps=6)
    assert "the checkpoint is at step 6 and steps=6: set steps above 6" in message
    assert not (tmp_path / "deep").exists()
    assert start(base, run_dir=str(tmp_path / "branch"), resume=str(parent), steps=7).first_step == 7


def test_a_start_that_comes_to_nothing_leaves_what_was_there(base: RunConfig, tmp_path: Path) -> None:
    from dataclasses import replace

    (tmp_path / "mine").mkdir()
    for name in ("mine", "a/b"):
        prepare_run_folder(replace(base, run_dir=str(tmp_path / name))).leave()
    assert not (tmp_path / "a").exists()
    assert list((tmp_path / "mine").iterdir()) == []
    prepare_run_folder(base).leave()
    assert not (tmp_path / "runs").exists()


def test_a_lock_that_another_holds_is_not_taken_away(base: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    holder = open(tmp_path / "run" / ".lock", "a", encoding="utf-8")  # noqa: SIM115 (held open on purpose)
    run_folder.fcntl.flock(holder, run_folder.fcntl.LOCK_EX)
    assert "another process" in refused(base, run_dir=str(tmp_path / "run"))
    assert (tmp_path / "run" / ".lock").exists()
    holder.close()


def test_a_branch_that_became_a_new_run_loses_its_mark(base: RunConfig, tmp_path: Path) -> None:
    parent = start(base, run_dir=str(tmp_path / "parent")).path
    checkpoint(parent, 6)
    branch = start(base, run_dir=str(tmp_path / "branch"), resume=str(parent)).path
    assert read_branch(branch) is not None
    assert start(base, run_dir=str(branch)).decision == "fresh"
    assert read_branch(branch) is None


@pytest.mark.parametrize("content", ['{"run": "/x", "chec', "[]", '{"run": "/x", "checkpoint": "/x/c"}', '"x"'])
def test_a_damaged_branch_mark_is_refused(base: RunConfig, tmp_path: Path, content: str) -> None:
    parent = start(base, run_dir=str(tmp_path / "parent")).path
    checkpoint(parent, 6)
    branch = start(base, run_dir=str(tmp_path / "branch"), resume=str(parent)).path
    checkpoint(branch, 7)
    (branch / "branch.json").write_text(content)
    message = refused(base, run_dir=str(branch))
    assert message.startswith(f"{branch / 'branch.json'}: is damaged")
    assert "another run_dir" in message


def test_a_branch_whose_origin_was_damaged_is_refused(base: RunConfig, tmp_path: Path) -> None:
    parent = start(base, run_dir=str(tmp_path / "parent")).path
    origin = checkpoint(parent, 6)
    branch = start(base, run_dir=str(tmp_path / "branch"), resume=str(parent)).path
    (branch / "metrics.jsonl").write_text('{"step": 7}\n')
    (origin / "__0_0.distcp").write_bytes(b"weigh")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged.*another run_dir"):
        start(base, run_dir=str(branch))


@pytest.mark.parametrize("content", ['{"starts": [', "{}", '{"starts": 3}', "[]", "\x00"])
def test_a_damaged_log_of_starts_begins_anew(base: RunConfig, tmp_path: Path, content: str) -> None:
    run = tmp_path / "run"
    start(base, run_dir=str(run))
    checkpoint(run, 10)
    (run / "environment.json").write_text(content)
    folder = prepare_run_folder(load_config(run))
    assert folder.record(ENVIRONMENT, {}).startswith(f"{run / 'environment.json'} was damaged")
    starts = json.loads((run / "environment.json").read_text())["starts"]
    assert [entry["step"] for entry in starts] == [10]


def test_a_place_that_may_not_be_written_says_the_way_out(
    base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: Any, **__: Any) -> None:
        raise OSError(errno.EACCES, "Permission denied")  # without a name, as some calls give it

    monkeypatch.setattr(Path, "mkdir", closed)
    message = refused(base, run_dir=str(tmp_path / "run"))
    assert message == f"{tmp_path / 'run'}: Permission denied. Choose another run_dir or make it writable."


def test_recipes_are_told_apart_by_their_numbers(base: RunConfig) -> None:
    def recipe(*overrides: str) -> dict[str, Any]:
        return recipe_of(compose(["steps=20", *overrides]))

    assert recipe() == json.loads(json.dumps(recipe()))
    assert recipe() == recipe("precision.backend=emulated", "precision.description=other")
    for other in ("precision=bf16", "precision.rotation=null", "precision.bf16_blocks.last=1"):
        assert recipe(other) != recipe(), other


def test_a_disk_that_fills_up_at_the_start_does_not_lock_the_run_out(
    base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    config = replace(base, run_dir=str(tmp_path / "run"))
    real = run_folder.write_atomic

    for good in range(3):
        writes = iter(range(good))

        def full(path: Path, content: str, writes: Iterator[int] = writes) -> None:
            if next(writes, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            real(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(run_folder, "write_atomic", full)
            patch.setattr("nvfp4_train.run_records.write_atomic", full)
            folder = prepare_run_folder(config)
            with pytest.raises(OSError, match="No space left"):
                folder.record(ENVIRONMENT, {})
            folder.leave()
        assert folder.path.exists() == (good > 0)
    assert start(config).decision == "fresh"


def test_a_run_that_may_be_started_again_needs_a_name(
    base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start would make a folder of its own and begin anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    with pytest.raises(ConfigError, match=r"Give run_dir=PATH, or launch without restarts"):
        prepare_run_folder(base)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    prepare_run_folder(base).leave()
