"""Processes share parts, or the batches of one: the same corpus, mistakes named, nobody left behind."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

import data.encoding
import data.parts
from data.config import DataError
from data.parts import Part
from data.prepare import prepare
from data.processes import _Worker, divide, number_of_processes
from data.sources import SourceFile, find_source
from tests.data.conftest import MakeConfig, numbered, write_jsonl
from tests.data.test_prepare import documents_of, silent


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.encoding, "BATCH_CHARACTERS", 1 << 14)


def part(number: int, size: int) -> Part:
    return Part(Path(str(number)), (SourceFile(Path("x"), "x", size, 0),))


@pytest.mark.parametrize(
    ("sizes", "processes", "alone", "together"),
    [
        ([5, 5, 5, 5], 2, [5, 5, 5, 5], []),
        ([5, 5, 5], 2, [5, 5], [5]),  # the third would keep one process and let the other wait
        ([7], 2, [], [7]),
        ([1, 90, 1, 2, 2], 2, [2, 2, 1, 1], [90]),
        ([5, 5, 5], 8, [], [5, 5, 5]),
        ([0], 4, [], [0]),  # a data set of the hub
        ([], 4, [], []),
    ],
)
def test_large_parts_are_made_together(sizes: list[int], processes: int, alone: list[int], together: list[int]) -> None:
    parts = [part(number, size) for number, size in enumerate(sizes)]
    divided = divide(parts, processes)
    assert [[one.size for one in some] for some in divided] == [alone, together]
    assert sorted([*divided[0], *divided[1]], key=parts.index) == parts


def test_as_many_processes_as_are_worth_starting(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    config, mega = make_config("x", tokenizer="a.json"), 1 << 20
    assert [number_of_processes(config, [part(0, n * mega)]) for n in (1, 15, 40, 4000)] == [1, 1, 5, 8]
    assert number_of_processes(config, [part(0, 0)]) == 8  # of the hub: nobody knows
    assert number_of_processes(dataclasses.replace(config, processes=3), [part(0, 1)]) == 3


def test_one_file_over_processes_is_the_same_corpus(tmp_path: Path, make_config: MakeConfig, bpe_file: Path) -> None:
    """In order, with what the normalizer empties, and documents larger than a batch."""
    texts = ["  ", *numbered(300, size=500), "x" * 50_000, "", *numbered(40, size=2000)]
    config = make_config(write_jsonl(tmp_path / "a.jsonl", texts), tokenizer=str(bpe_file), processes=1)
    one = prepare(config, say=silent)
    several = prepare(dataclasses.replace(config, processes=3, prepared=config.prepared + "-2"), say=silent)
    assert dataclasses.replace(several, path=one.path) == one
    for split in ("train", "validation"):
        for end in ("bin", "idx"):
            name = f"{split}.{end}"
            assert (several.path / name).read_bytes() == (one.path / name).read_bytes()
    indexed = dataclasses.replace(config, path=str(one.path / "train.idx"), processes=2)
    again = prepare(indexed, say=silent)  # ids travel as well as text
    assert sorted(documents_of(again, "train") + documents_of(again, "validation")) == sorted(
        documents_of(one, "train")
    )


def test_a_bad_line_far_behind_is_named(tmp_path: Path, make_config: MakeConfig, bpe_file: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered(400, size=500))
    with path.open("a") as stream:
        stream.write('{"text": 3}\n')
    with pytest.raises(DataError, match=rf"^{path}:401: field 'text' is a JSON number"):
        prepare(make_config(path, tokenizer=str(bpe_file), processes=2), say=silent)
    assert [one.name for one in (tmp_path / "prepared").iterdir() if one.is_dir()] == []


def test_a_process_that_is_killed_is_named_and_the_next_try_goes_on(
    tmp_path: Path, make_config: MakeConfig, bpe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered(400, size=500))
    config = make_config(path, tokenizer=str(bpe_file), processes=2)
    batched = data.encoding.batched

    def killing(contents: Any) -> Iterator[Any]:
        for number, batch in enumerate(batched(contents)):
            if number == 6:
                for child in multiprocessing.active_children():
                    child.kill()
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr("data.parts.batched", killing)
        with pytest.raises(DataError, match=r"a process that prepared a was killed, .*data\.processes=1"):
            prepare(config, say=silent)
    assert prepare(config, say=silent).train.documents > 300


PROGRAM = """
import sys
from data.config import DataConfig
from data.prepare import prepare
print("here", flush=True)
prepare(DataConfig(sys.argv[1], sys.argv[2], 8, 1, 1, tokenizer=sys.argv[3], processes=2))
"""


def test_processes_run_no_script_twice_and_end_with_the_one_that_started_them(tmp_path: Path, bpe_file: Path) -> None:
    """The script calls `prepare` without a guard; killed while its processes wait, it leaves none behind."""
    (tmp_path / "script.py").write_text(PROGRAM)

    folder = tmp_path / "source"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", numbered(100, size=500))
    again = write_jsonl(folder / "b.jsonl", numbered(100, size=50_000))
    again.with_name("c.jsonl").symlink_to(again)
    command = [sys.executable, str(tmp_path / "script.py"), str(folder), str(tmp_path / "prepared"), str(bpe_file)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "here\n"
        assert "preparing source" in script.stdout.readline()
        children: list[str] = []
        while len(children) < 3:  # two, and the one that keeps track of what they share
            assert script.poll() is None
            children = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text(encoding="utf-8").split()
        script.kill()
        rest = script.stdout.read()  # ends when nobody holds the other end
    assert "here" not in rest
    deadline = time.monotonic() + 60
    while left := [child for child in children if Path(f"/proc/{child}").exists()]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def test_bytes_are_made_where_they_are_read(
    tmp_path: Path, make_config: MakeConfig, bpe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = make_config("x", processes=3)
    assert [number_of_processes(several, [part(i, 1) for i in range(count)]) for count in (1, 2, 9)] == [1, 2, 3]
    folder = tmp_path / "source"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", numbered(300, size=500))
    write_jsonl(folder / "b.jsonl", numbered(30))
    monkeypatch.setattr(data.parts, "PART_BYTES", 1000)
    asked: list[object] = []
    ask = _Worker.ask

    def noted(worker: _Worker, question: Any, *arguments: Any) -> Any:
        asked.append(type(question))
        return ask(worker, question, *arguments)

    monkeypatch.setattr(_Worker, "ask", noted)
    prepare(make_config(folder, processes=2), say=silent)
    assert asked == [Part, Part]
    prepare(make_config(folder, tokenizer=str(bpe_file), processes=2), say=silent)
    assert asked.count(list) > 8


@pytest.fixture
def worker(tmp_path: Path, make_config: MakeConfig) -> Iterator[_Worker]:
    config = make_config(write_jsonl(tmp_path / "a.jsonl", numbered(30)))
    made = _Worker(find_source(str(config.path)), config)
    yield made
    made.stop()
    made.join()


def test_a_process_never_hears_of_an_interruption_and_the_one_that_started_it_does(worker: _Worker) -> None:
    """Ctrl-C comes to all, also while they still import."""
    status = Path(f"/proc/{worker._process.pid}/status").read_text(encoding="utf-8")
    blocked = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:"))
    assert int(blocked, 16) >> (signal.SIGINT - 1) & 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_process_is_stopped_while_it_is_being_asked(worker: _Worker) -> None:
    """What tells it to end comes behind the question, not in the middle of it."""
    assert worker.ask(["warm"], lambda count: None).ids.tolist() == [*b"warm"]
    pid = worker._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(worker.ask, ["x" * (1 << 24)], lambda count: None)
        while not worker._sending.locked():  # until it has begun, which it can't end: the pipe is full before
            time.sleep(0.01)
        told = threads.submit(worker.stop)
        assert not wait([told], 0.2).done
        os.kill(pid, signal.SIGCONT)
        assert answer.result(120).ids.size == 1 << 24
        told.result(120)
    worker._process.join(120)
    assert worker._process.exitcode == 0


def test_what_is_under_way_is_bounded(tmp_path: Path, make_config: MakeConfig, bpe_file: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered(3000, size=5_000))
    prepare(make_config(write_jsonl(tmp_path / "b.jsonl", numbered(30))), say=silent)  # imports
    tracemalloc.start()
    try:
        prepare(make_config(path, tokenizer=str(bpe_file), processes=2), say=silent)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 15e6
    assert peak < 12e6  # of which 8 are buffers of the files that are written
