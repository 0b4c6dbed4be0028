"""Parts, processes, shards and restarts change nothing about a corpus."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data.parts
import data.processes
import data.progress
from data.ahead import ahead
from data.config import DataConfig, DataError
from data.corpus import Corpus
from data.encoding import encode_batch
from data.parts import build_part, cut_parts
from data.prepare import Shard, prepare, prepare_shard
from data.progress import Progress, saying
from data.sources import find_source
from data.splitting import position
from data.tokenizers import load_tokenizer
from data.writing import write_index
from tests.data.conftest import MakeConfig, numbered, write_jsonl
from tests.data.test_prepare import documents_of, silent


@pytest.fixture
def many(tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """Five files, a part each."""
    monkeypatch.setattr(data.parts, "PART_BYTES", 500)
    folder = tmp_path / "source"
    folder.mkdir()
    texts = numbered(50)
    for i in range(5):
        write_jsonl(folder / f"{i}.jsonl", texts[10 * i : 10 * i + 10])
    return make_config(folder, processes=1)


def test_files_side_by_side_share_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.parts, "PART_BYTES", 100)
    for name, size in (("a", 40), ("b", 60), ("c", 1), ("d", 300), ("e", 10)):
        (tmp_path / f"{name}.txt").write_text("x" * size)
    parts = cut_parts(find_source(str(tmp_path)), tmp_path / "parts")
    assert [[file.name[0] for file in part.files] for part in parts] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [part.folder.name for part in parts] == [f"part-{i:05d}" for i in range(4)]


@pytest.mark.parametrize("size", [1_500, 10**6])
def test_parts_change_nothing_about_what_is_held_out(
    many: DataConfig, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither with some documents under the share nor with none, where the one of the smallest hash is held out."""
    monkeypatch.setattr(data.parts, "PART_BYTES", size)
    texts = numbered(50)
    for share in (0.1, 0.0):
        corpus = prepare(dataclasses.replace(many, validation_share=share), say=silent)
        held_out = [text for text in texts if position(text.encode()) < share]
        held_out = held_out or [min(texts, key=lambda text: position(text.encode()))]
        assert documents_of(corpus, "validation") == [[*text.encode(), 256] for text in held_out]
        rest = sorted([*text.encode(), 256] for text in texts if text not in held_out)
        assert sorted(documents_of(corpus, "train")) == rest
        assert (corpus.train.documents, corpus.validation.documents) == (50 - len(held_out), len(held_out))
        assert corpus.train.bytes == sum(len(text.encode()) for text in texts if text not in held_out)
        assert [file.name for file in corpus.source.files] == [f"{i}.jsonl" for i in range(5)]


@pytest.mark.slow
def test_processes_make_the_same_corpus(many: DataConfig, bpe_file: Path) -> None:
    for tokenizer in ("byte", str(bpe_file)):
        one = dataclasses.replace(many, tokenizer=tokenizer)
        several = dataclasses.replace(one, processes=2, prepared=many.prepared + "-2")
        assert prepare(one, say=silent).hash == prepare(several, say=silent).hash


def test_a_mistake_in_a_process_is_the_user_s(many: DataConfig) -> None:
    assert many.path is not None
    (Path(many.path) / "3.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(DataError, match=r"3\.jsonl:1: field 'text' is a JSON number"):
        prepare(dataclasses.replace(many, processes=2), say=silent)


def test_bad_documents_are_counted_over_all_parts(many: DataConfig) -> None:
    assert many.path is not None
    for name in ("1", "4"):
        with (Path(many.path) / f"{name}.jsonl").open("a") as stream:
            stream.write("{\n")
    with pytest.raises(DataError, match=r"4\.jsonl:11: not JSON.*unreadable document 2, and .* is 1"):
        prepare(dataclasses.replace(many, max_bad_documents=1), say=silent)
    lines: list[str] = []
    corpus = prepare(dataclasses.replace(many, max_bad_documents=2), say=lines.append)
    assert [Path(one.origin).name for one in corpus.bad] == ["1.jsonl:11", "4.jsonl:11"]


def kill_in_the_third_part(config: DataConfig) -> None:
    done: list[Any] = []

    def counted(*arguments: Any) -> Any:
        if len(done) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(arguments)
        return build_part(*arguments)

    data.processes.build_part = counted  # type: ignore[assignment]
    prepare(config, say=silent)


def test_killed_it_goes_on_with_the_files_that_are_left(many: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    job = multiprocessing.get_context("fork").Process(target=kill_in_the_third_part, args=(many,))
    job.start()
    job.join(120)
    assert job.exitcode == -signal.SIGKILL
    built: list[str] = []

    def counted(source: Any, part: Any, *arguments: Any) -> Any:
        built.append(part.files[0].name)
        return build_part(source, part, *arguments)

    monkeypatch.setattr(data.processes, "build_part", counted)
    lines: list[str] = []
    corpus = prepare(many, say=lines.append)
    assert built == ["2.jsonl", "3.jsonl", "4.jsonl"]
    assert lines[0].endswith("; 2 of 5 parts are there already")
    monkeypatch.undo()
    monkeypatch.setattr(data.parts, "PART_BYTES", 500)
    whole = prepare(dataclasses.replace(many, prepared=many.prepared + "-2"), say=silent)
    assert corpus.hash == whole.hash
    assert [p.name for p in corpus.path.parent.iterdir() if p.is_dir()] == [corpus.path.name]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_shards_share_the_work_and_the_last_puts_it_together(many: DataConfig, order: tuple[int, ...]) -> None:
    lines: list[str] = []
    made = [prepare_shard(many, Shard(number, 3), say=lines.append) for number in order]
    assert made[0] is made[1] is None
    assert f"data: shard {order[0]}/3 is done; " in "\n".join(lines)
    assert made[2] is not None
    whole = prepare(dataclasses.replace(many, prepared=many.prepared + "-2"), say=silent)
    assert made[2].hash == whole.hash
    again = prepare_shard(many, Shard(1, 3), say=lines.append)  # late: the corpus is there
    assert again == made[2]


def test_a_command_without_shard_makes_what_shards_left(many: DataConfig) -> None:
    assert prepare_shard(many, Shard(2, 2), say=silent) is None
    lines: list[str] = []
    prepare(many, say=lines.append)
    assert lines[0].endswith("; 2 of 5 parts are there already")


@pytest.mark.parametrize("call", [1, 2])
def test_a_shard_whose_work_another_command_finished_takes_the_corpus(
    many: DataConfig, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    real, calls, whole = Progress.add, count(1), list[Corpus]()

    def overtaken(self: Progress, size: int) -> None:
        """The other command begins and ends in the middle of a part of this one."""
        if next(calls) == call:
            monkeypatch.setattr(Progress, "add", real)
            whole.append(prepare(many, say=silent))
        real(self, size)

    monkeypatch.setattr(Progress, "add", overtaken)
    lines: list[str] = []
    assert prepare_shard(many, Shard(1, 2), say=lines.append) == whole[0]
    assert lines[-1].startswith("data: reusing ")
    assert not list(whole[0].path.parent.glob(".*.building")), "what nobody needs is gone"


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/0"])
def test_shards_that_are_none(text: str) -> None:
    with pytest.raises(DataError, match=rf"shard={text}: wanted i/n"):
        Shard.parse(text)


def test_the_index_is_that_of_megatron(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    documents = [np.arange(size) for size in (3, 1, 70, 2)]
    for dtype in (np.uint16, np.int32):
        builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(str(tmp_path / "theirs.idx"))
        write_index(tmp_path / "ours.idx", np.array([len(d) for d in documents], dtype=np.int32), dtype)  # type: ignore[arg-type]
        assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()
        (tmp_path / "ours.bin").write_bytes((tmp_path / "theirs.bin").read_bytes())
        read = IndexedDataset(str(tmp_path / "ours"))  # to be held: its arrays are gone with it
        assert read[2].tolist() == list(range(70))


def test_what_is_read_ahead_is_the_same_and_so_is_what_is_raised() -> None:
    assert list(ahead(range(100), 3)) == list(range(100))

    def fail() -> Any:
        yield 1
        raise DataError("here")

    items = ahead(fail(), 2)
    assert next(items) == 1
    with pytest.raises(DataError, match="here"):
        next(items)
    left = ahead(iter(range(10**9)), 2)
    assert next(left) == 0
    left.close()  # the thread ends though nobody reads on


def test_progress_says_share_rate_and_time_left() -> None:
    now, lines = [0.0], []
    progress = Progress(200_000_000, lambda: now[0])
    for seconds, more in ((10.0, 0), (20.0, 10**7), (30.0, 5 * 10**7), (40.0, 0), (60.0, 6 * 10**7)):
        now[0] = seconds
        if more:
            progress.add(more)
        lines.append(progress.line())
    assert lines == [
        "data: 0% of 200 MB; no text yet: files are hashed and checked first (10 s)",
        "data: 5% of 200 MB",
        "data: 30% of 200 MB, 5.0 MB/s, 28 s left",
        "data: 30% of 200 MB; no more text (10 s)",
        "data: 60% of 200 MB, 2.8 MB/s, 29 s left",
    ]
    hub = Progress(0, lambda: now[0])
    for more in (10**6, 3 * 10**7):
        hub.add(more)
        now[0] += 10
    assert hub.line() == "data: 31 MB done, 1.5 MB/s"


def test_somebody_who_waits_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.progress, "SECONDS_BETWEEN_LINES", 0.01)
    lines: list[str] = []
    with saying(lines.append, lambda seconds: f"{seconds > 0}"):
        while len(lines) < 3:
            time.sleep(0.01)
    heard = len(lines)
    time.sleep(0.05)
    assert lines == ["True"] * heard


def test_a_shard_without_work_leaves_that_of_others_alone(tmp_path: Path, make_config: MakeConfig) -> None:
    config = make_config(write_jsonl(tmp_path / "a.jsonl", numbered(30)))
    assert prepare_shard(config, Shard(2, 2), say=silent) is None
    (building,) = [path for path in (tmp_path / "prepared").iterdir() if path.is_dir()]
    (building / ".part-00000.elsewhere.1").mkdir()
    assert prepare_shard(config, Shard(2, 2), say=silent) is None
    assert (building / ".part-00000.elsewhere.1").exists()
    assert prepare_shard(config, Shard(1, 2), say=silent) is not None


def test_a_part_that_somebody_else_made_meanwhile_is_taken(many: DataConfig, tmp_path: Path) -> None:
    assert many.path is not None
    source = find_source(many.path)
    part = cut_parts(source, tmp_path / "parts")[0]
    tokenizer = load_tokenizer(many.tokenizer)
    arguments = source, part, many, tokenizer, partial(map, partial(encode_batch, tokenizer)), lambda count: None
    first = build_part(*arguments)
    assert build_part(*arguments) == first
    assert [path.name for path in part.folder.parent.iterdir()] == ["part-00000"]
