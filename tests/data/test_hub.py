"""Data sets and tokenizers of the hub, without asking it: what is read, and what is said where it is out of reach."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import data.hub
from data.config import DataError
from data.hub import HubDataset, parse_hub
from data.prepare import prepare
from data.readers import BadDocument, Document, read_documents
from data.sources import find_source
from data.tokenizers import load_tokenizer, tokenizer_hash
from tests.data.conftest import MakeConfig, numbered, write_jsonl


class Rows:
    """What `load_dataset` gives, streamed or not."""

    column_names = ("id", "body")

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"id": i, "body": row} for i, row in enumerate(self._rows)])


class Builder:
    hash = "one"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Three rows and a bad one; returns what was asked for."""
    import datasets

    asked: list[dict[str, Any]] = []

    def load(name: str, subset: str | None, **options: Any) -> Rows:
        asked.append({"name": name, "subset": subset, **options})
        return Rows([*numbered(20), None])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: Builder)
    return asked


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("hub:org/name", HubDataset("org/name", None, None)),
        ("hub:name:en", HubDataset("name", "en", None)),
        ("hub:org/name:en@1f2e", HubDataset("org/name", "en", "1f2e")),
    ],
)
def test_names(path: str, wanted: HubDataset) -> None:
    assert parse_hub(path) == wanted
    assert str(wanted) == path


def test_a_name_is_wanted() -> None:
    with pytest.raises(DataError, match="'hub:' names no data set"):
        parse_hub("hub:")


@pytest.mark.parametrize("stream", [True, False])
def test_rows_are_documents(hub: list[dict[str, Any]], stream: bool) -> None:
    source = find_source("hub:org/name:en@1f")
    documents = list(read_documents(source, "body", stream=stream))
    assert documents[:20] == [Document(text, f"hub:org/name:en@1f:{i}") for i, text in enumerate(numbered(20), 1)]
    assert documents[20] == BadDocument("hub:org/name:en@1f:21", "null in column 'body'")
    assert hub == [{"name": "org/name", "subset": "en", "revision": "1f", "split": "train", "streaming": stream}]
    with pytest.raises(DataError, match=r"has no column 'text'; its columns are 'id', 'body'"):
        list(read_documents(source, "text"))


def test_it_is_prepared_like_any_source_and_anew_when_it_changes(
    hub: list[dict[str, Any]], tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("hub:org/name", text_field="body", max_bad_documents=1, processes=1)
    lines: list[str] = []
    corpus = prepare(config, say=lines.append)
    assert lines[0].startswith("data: preparing org_name (from the hub) in ")
    local = prepare(make_config(write_jsonl(tmp_path / "a.jsonl", numbered(20))), say=lambda line: None)
    assert corpus.hash == local.hash
    assert prepare(config, say=lambda line: None) == corpus
    monkeypatch.setattr(Builder, "hash", "two")
    assert prepare(config, say=lambda line: None).path != corpus.path


def test_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: Any, **__: Any) -> NoReturn:
        raise ConnectionError("Couldn't reach 'org/name' on the Hub (offline).")

    monkeypatch.setattr(datasets, "load_dataset_builder", offline)
    with pytest.raises(
        DataError, match=r"hub:org/name can't be read .*\(offline\)\. Check.*hf download --repo-type dataset org/name"
    ):
        find_source("hub:org/name")


def test_a_cache_that_can_not_be_written_is_not_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def closed(*_: Any, **__: Any) -> NoReturn:
        try:
            raise PermissionError(13, "Permission denied", "/cache/datasets")
        except PermissionError as error:
            raise RuntimeError("An error occurred") from error

    monkeypatch.setattr(datasets, "load_dataset_builder", closed)
    with pytest.raises(DataError, match=r"can't keep what they load: .*'/cache/datasets'\. Set HF_HOME to a folder"):
        find_source("hub:org/name")


def test_a_busy_hub_is_asked_again_and_one_that_refuses_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(data.hub, "PAUSES", (0.0, 0.0))
    for status, tries in ((503, 3), (429, 3), (404, 1), (401, 1)):
        asked: list[int] = []

        def refuse(*_: Any, status: int = status, asked: list[int] = asked, **__: Any) -> NoReturn:
            asked.append(status)
            error = ConnectionError("no")
            error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
            raise error

        monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
        with pytest.raises(DataError, match="can't be read from the hub: no"):
            find_source("hub:org/name")
        assert len(asked) == tries


def test_a_tokenizer_of_the_hub(bpe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def download(model: str, file: str, revision: str | None) -> str:
        asked.append((model, file, revision))
        return str(shutil.copy(bpe_file, tmp_path / file))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert (
        load_tokenizer("hub:org/model@v1").hash == load_tokenizer(str(bpe_file)).hash == tokenizer_hash("hub:org/model")
    )
    assert asked[0] == ("org/model", "tokenizer.json", "v1")

    def offline(*_: Any, **__: Any) -> NoReturn:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    words = r"tokenizer\.json of hub:org/model is neither in the cache nor within reach: no net.*hf download org/model"
    with pytest.raises(DataError, match=words):
        load_tokenizer("hub:org/model")
