"""Saves behind training's back: it goes on meanwhile, nothing is lost, and what goes wrong is said."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_train.checkpoints.files import CheckpointError, latest, saved_steps
from nvfp4_train.checkpoints.writer import CheckpointWriter, FileSystemWriterAsync
from nvfp4_train.config import RunConfig
from nvfp4_train.exits import ExitCode
from nvfp4_train.trainer import Trainer, train
from tests.trainer.conftest import Make
from tests.trainer.test_resume import assert_same_run, tensors

OPTIONS = ("bf16", "steps=5", "checkpoint.keep=0", "evaluation.sequences=0")
At = Callable[[int, Callable[[], None]], None]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written before this event."""
    free = threading.Event()
    real = FileSystemWriterAsync.write_preloaded_data

    def waits(*args: Any, **options: Any) -> Any:
        assert free.wait(60)
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriterAsync, "write_preloaded_data", waits)
        yield free


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    """`at(step, action)`: does something in that step of training."""
    real = Trainer._train_step

    def add(step: int, action: Callable[[], None]) -> None:
        def stepping(trainer: Trainer, batches: Any) -> Any:
            if trainer.step + 1 == step:
                action()
            return real(trainer, batches)

        monkeypatch.setattr(Trainer, "_train_step", stepping)

    return add


def checkpoints(config: RunConfig) -> Path:
    return Path(str(config.run_dir)) / "checkpoints"


def test_training_goes_on_and_latest_moves_last(
    make: Make, disk: threading.Event, at: At, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make(*OPTIONS)
    seen: list[Any] = []

    def look() -> None:
        seen.extend([saved_steps(checkpoints(config)), latest(checkpoints(config))])
        disk.set()

    at(4, look)
    assert train(config) == ExitCode.DONE
    assert seen == [[], None]
    said = capsys.readouterr().out
    order = ["step 2/5", "step-00000002: requested", "step 3/5", "step 4/5", "step-00000002: durable"]
    order += [f"step-0000000{step}: {what}" for step in (4, 5) for what in ("requested", "durable")]  # one at a time
    places = [said.index(text) for text in order]
    assert places == sorted(places)
    assert saved_steps(checkpoints(config)) == [2, 4, 5]
    size = sum(file.stat().st_size for file in (checkpoints(config) / "step-00000005").iterdir())
    assert f"step-00000005: durable, {size / 1e6:.1f} MB written in " in said
    whole = make(*OPTIONS, run="whole")
    assert train(whole) == ExitCode.DONE
    assert_same_run(whole, config, 5)
    for step in (2, 4):  # what was saved is what it was when it was asked for
        written = tensors(config, step)
        assert all(torch.equal(written[key], value) for key, value in tensors(whole, step).items())


def test_a_signal_in_a_save_ends_it_and_saves_once_more(
    make: Make, disk: threading.Event, at: At, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = CheckpointWriter.finish
    struck = threading.Event()

    def strike() -> None:
        struck.set()
        os.kill(os.getpid(), signal.SIGTERM)

    def finish(writer: CheckpointWriter) -> None:
        if struck.is_set():  # not before training waits for the save that the signal came in
            disk.set()
        real(writer)

    config = make(*OPTIONS)
    at(3, strike)
    monkeypatch.setattr(CheckpointWriter, "finish", finish)
    assert train(config) == ExitCode.INTERRUPTED
    assert saved_steps(checkpoints(config)) == [2, 3]
    said = capsys.readouterr().out
    order = ["step-00000002: requested", "step 3/5", "step-00000002: durable", "step-00000003: durable"]
    places = [said.index(text) for text in [*order, "interrupted after step 3, which is saved"]]
    assert places == sorted(places)


def test_a_full_disk_ends_the_run_with_what_was_saved_before(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in the thread, said by the run; with room again the same command goes on."""
    config, whole = make(*OPTIONS), make(*OPTIONS, run="whole")
    real = FileSystemWriterAsync.write_preloaded_data
    full = 0, OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(
            FileSystemWriterAsync,
            "write_preloaded_data",
            lambda *args, **options: full if "step-00000004" in args[2][0] else real(*args, **options),
        )
        with pytest.raises(CheckpointError, match=r"no room for a checkpoint in .*: [\d,]+ bytes are needed and"):
            train(config)
    assert sorted(entry.name for entry in checkpoints(config).iterdir()) == ["latest", "step-00000002"]
    assert train(config) == train(whole) == ExitCode.DONE
    assert_same_run(whole, config, 5)


def test_an_error_in_training_lets_go_of_a_save(make: Make, disk: threading.Event, at: At) -> None:
    config = make(*OPTIONS)

    def fail() -> None:
        disk.set()
        raise MemoryError

    at(3, fail)
    with pytest.raises(MemoryError):
        train(config)
    assert "checkpoint" not in {thread.name for thread in threading.enumerate()}
    assert latest(checkpoints(config)) is None
    assert [entry.suffix for entry in checkpoints(config).iterdir()] == [".tmp"]
