"""Files and folders of other users: each refusal names what forbids it, whose that is and the way out."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import data.parts
from data.config import DataConfig, DataError
from data.inspect import inspect
from data.prepare import prepare
from data.tokenizers import load_tokenizer
from tests.data.conftest import numbered, write_jsonl

NOBODY = 65534
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may enter and write to, with a text in it, and all modules loaded that reading takes."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    write_jsonl(folder / "a.jsonl", numbered(30))
    prepare(config_of(folder), say=lambda line: None)
    try:
        yield folder
    finally:
        for path in sorted(folder.rglob("*")):
            path.chmod(0o700)
        shutil.rmtree(folder)


def config_of(place: Path, **changes: str) -> DataConfig:
    config = DataConfig(str(place / "a.jsonl"), str(place / "prepared"), 32, 8, 2)
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def somebody_else(call: Callable[[], object]) -> str:
    """What `call` says, or raises as a DataError, in a process without root's privileges."""
    answers = FORK.SimpleQueue()

    def child() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        try:
            answers.put(str(call()))
        except DataError as error:
            answers.put(f"DataError: {error}")

    job = FORK.Process(target=child)
    job.start()
    job.join(120)
    assert job.exitcode == 0
    return str(answers.get())


def prepared_by_somebody_else(place: Path, **changes: str) -> str:
    return somebody_else(lambda: prepare(config_of(place, **changes), say=lambda line: None).train.documents)


@pytest.mark.parametrize(
    ("closed", "mode", "asked", "words"),
    [
        ("a.jsonl", 0o000, "a.jsonl", "data.path: can't read {asked}: "),
        ("sub", 0o000, "sub/a.jsonl", "data.path: can't read {asked}: "),
        ("sub", 0o000, "sub", "data.path: can't list {asked}: "),
        ("sub/b.jsonl", 0o000, "sub", "data.path: can't read {closed}: "),
    ],
)
def test_a_source_that_this_user_may_not_read(
    place: Path, closed: str, mode: int, asked: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.parts, "PART_BYTES", 100)  # a file is a part, and the one ahead could be made
    (place / "sub").mkdir()
    for name in ("sub/a.jsonl", "sub/b.jsonl"):
        write_jsonl(place / name, numbered(30))
    (place / closed).chmod(mode)
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    said = prepared_by_somebody_else(place, path=str(place / asked), prepared=str(elsewhere))
    start = words.format(asked=place / asked, closed=place / closed)
    assert said.startswith(f"DataError: {start}Permission denied ({place / closed} belongs to user ")
    assert f", mode {mode:03o}, and this is user " in said
    assert "Make it readable" in said
    assert not [path for path in elsewhere.iterdir() if path.is_dir()]  # before anything is made


def test_a_prepared_corpus_of_another_user_is_read_and_never_written_to(place: Path) -> None:
    (folder,) = [path for path in (place / "prepared").iterdir() if path.is_dir()]
    (place / "a.jsonl").chmod(0o000)  # what is prepared is found by the list of files alone
    for path in (*folder.iterdir(), *(place / "prepared").glob(".*.lock")):
        path.chmod(0o444)
    folder.chmod(0o555)
    (place / "prepared").chmod(0o555)
    assert prepared_by_somebody_else(place) == prepared_by_somebody_else(place, path=str(folder)) != ""
    assert int(prepared_by_somebody_else(place)) > 20
    for closed, file in (("train.bin", "train.bin"), ("manifest.json", "manifest.json"), (".", "manifest.json")):
        mode = (folder / closed).stat().st_mode
        (folder / closed).chmod(0o000)
        said = prepared_by_somebody_else(place)
        assert said.startswith(
            f"DataError: can't read {folder / file}: Permission denied ({folder / closed} belongs to"
        )
        assert said.endswith("or prepare the text in a folder of your own (data.prepared).")
        (folder / closed).chmod(mode)


def test_the_lock_of_another_user_is_held_all_the_same(place: Path) -> None:
    """One that could not be would keep everybody else from a text whose preparation was given up."""
    folder = place / "prepared"
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.chmod(0o444)
    folder.chmod(0o777)
    assert int(prepared_by_somebody_else(place)) > 20


def test_a_folder_that_this_user_may_not_write_to(place: Path) -> None:
    closed = place / "closed"
    closed.mkdir()
    for mode in (0o555, 0o000):
        closed.chmod(mode)
        for prepared in (closed, closed / "a" / "b"):
            said = prepared_by_somebody_else(place, prepared=str(prepared))
            start = f"DataError: data.prepared: can't write in {prepared}: Permission denied ({closed} belongs to user "
            assert said.startswith(start)
            assert said.endswith("Set data.prepared to a folder that can be written.")


def test_what_another_user_has_begun(place: Path) -> None:
    folder = place / "prepared"
    (corpus,) = [path for path in folder.iterdir() if path.is_dir()]
    corpus.rename(place / "away")
    building = folder / f".{corpus.name}.building"
    (building / "part-00009").mkdir(parents=True)
    folder.chmod(0o777)
    (building / "part-00009").chmod(0o555)
    building.chmod(0o555)
    said = prepared_by_somebody_else(place)
    assert said.startswith(
        f"DataError: data.prepared: can't write {building}: Permission denied ({building} belongs to"
    )
    assert said.endswith("Set data.prepared to a folder of your own, or let that user prepare it.")


def test_tokenizers_and_runs_of_another_user(place: Path) -> None:
    closed = place / "closed"
    closed.mkdir()
    closed.chmod(0o000)
    said = somebody_else(lambda: load_tokenizer(str(closed / "t.json")))
    assert said.startswith(
        f"DataError: data.tokenizer: can't read {closed}/t.json: Permission denied ({closed} belongs"
    )
    said = somebody_else(lambda: list(inspect(closed, 1)))
    assert said.startswith(f"DataError: can't read {closed}/data.json: Permission denied ({closed} belongs")
