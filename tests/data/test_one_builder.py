"""Of several that prepare a source at once one builds, and the others wait for it, however slow it is or if it dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

import data.parts
import data.progress
from data.config import DataConfig
from data.prepare import prepare
from data.readers import AnyDocument, read_documents
from tests.data.conftest import MakeConfig, numbered, write_jsonl
from tests.data.test_prepare import silent

FORK = multiprocessing.get_context("fork")
Lines = list[str]


def slowly(reached: Event, pause: Callable[[], None]) -> None:
    """Makes the first reader wait after its first document, in this process and its forks."""

    def read(*arguments: Any) -> Iterator[AnyDocument]:
        for document in read_documents(*arguments):
            yield document
            if not reached.is_set():
                reached.set()
                pause()

    data.parts.read_documents = read  # type: ignore[assignment]


def build(
    config: DataConfig, reached: Event, pause: Callable[[Lines], None], lines: multiprocessing.SimpleQueue[Lines]
) -> None:
    """Prepares in a process; `pause` is told what was said so far."""
    heard: Lines = []
    slowly(reached, lambda: pause(heard))
    prepare(config, say=heard.append)
    lines.put(heard)


def test_eight_at_once_build_once(tmp_path: Path, make_config: MakeConfig) -> None:
    config = make_config(write_jsonl(tmp_path / "a.jsonl", numbered(30)))
    reached, lines = FORK.Event(), FORK.SimpleQueue()
    jobs = [FORK.Process(target=build, args=(config, reached, lambda heard: time.sleep(0.5), lines)) for _ in range(8)]
    jobs[0].start()
    assert reached.wait(120)
    for job in jobs[1:]:
        job.start()
    for job in jobs:
        job.join(120)
        assert job.exitcode == 0
    heard = sorted([lines.get() for _ in jobs], key=lambda one: "reusing" in one[-1])
    assert heard[0][0].startswith("data: preparing a (1 file, ")
    for other in heard[1:]:
        assert "data: reusing " in other[-1]
        assert "another process is preparing" in other[0] or len(other) == 1
    assert len([p for p in (tmp_path / "prepared").iterdir() if p.is_dir()]) == 1


def test_a_slow_one_is_waited_for_and_both_say_what_for(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow its disk is: the lock is its own until it ends."""
    monkeypatch.setattr(data.progress, "SECONDS_BETWEEN_LINES", 0.1)
    config = make_config(write_jsonl(tmp_path / "a.jsonl", numbered(30)))
    reached, lines, patient = FORK.Event(), FORK.SimpleQueue(), FORK.Event()

    def pause(said: Lines) -> None:
        """Until either has heard enough of it."""
        assert patient.wait(120)
        while len(said) < 1 + 3:
            time.sleep(0.01)

    job = FORK.Process(target=build, args=(config, reached, pause, lines))
    job.start()
    assert reached.wait(120)
    heard: Lines = []

    def hear(line: str) -> None:
        heard.append(line)
        if len(heard) == 1 + 3:
            patient.set()

    corpus = prepare(config, say=hear)
    job.join(120)
    assert job.exitcode == 0
    assert heard[0].startswith("data: another process is preparing a-")
    assert len([line for line in heard[1:-1] if line.endswith(" s so far; 0 of 1 parts are there")]) >= 3
    assert heard[-1].startswith(f"data: reusing {corpus.name}")
    slow = lines.get()
    assert slow[0].startswith("data: preparing a ")
    assert len([line for line in slow if "no text yet: files are hashed and checked first" in line]) >= 3


def test_killed_while_building_leaves_nothing_that_is_read(tmp_path: Path, make_config: MakeConfig) -> None:
    config = make_config(write_jsonl(tmp_path / "a.jsonl", numbered(30)))
    reached = FORK.Event()
    job = FORK.Process(target=build, args=(config, reached, lambda heard: time.sleep(600), FORK.SimpleQueue()))
    job.start()
    assert reached.wait(120)
    assert job.pid is not None
    os.kill(job.pid, signal.SIGKILL)
    job.join(120)
    left = [p for p in (tmp_path / "prepared").iterdir() if p.is_dir()]
    assert [p.name[0] for p in left] == ["."]
    assert not (left[0] / "manifest.json").exists()
    corpus = prepare(config, say=silent)
    assert corpus.train.documents + corpus.validation.documents == 30
    assert [p for p in (tmp_path / "prepared").iterdir() if p.is_dir()] == [corpus.path]
