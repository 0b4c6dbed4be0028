"""No token lost, nothing half-made ever read, and each mistake named with its place."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import data.parts
import data.prepare
from data.config import DataError
from data.corpus import Corpus
from data.prepare import prepare
from data.splitting import position
from tests.data.conftest import MakeConfig, numbered, write_jsonl


def silent(line: str) -> None:
    """For tests that do not look at the lines."""


def documents_of(corpus: Corpus, split: str) -> list[list[int]]:
    """The ids of every document, as Megatron reads them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    indexed = IndexedDataset(corpus.prefix(split))
    return [indexed[i].tolist() for i in range(len(indexed))]


def test_every_token_arrives_and_one_more_a_document(tmp_path: Path, make_config: MakeConfig) -> None:
    config = make_config(tmp_path / "a.jsonl")
    length = config.sequence_length
    texts = ["a", "b" * (length - 1), "c" * (3 * length), "ü", *numbered(30)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    lines: list[str] = []
    corpus = prepare(config, say=lines.append)
    wanted: dict[str, list[list[int]]] = {"train": [], "validation": []}
    for text in texts:
        wanted["validation" if position(text.encode()) < 0.1 else "train"].append([*text.encode(), 256])
    assert wanted["validation"]
    for split, info in (("train", corpus.train), ("validation", corpus.validation)):
        assert sorted(documents_of(corpus, split)) == sorted(wanted[split])
        assert info.documents == len(wanted[split])
        assert info.tokens == sum(map(len, wanted[split])) == info.bytes + info.documents
        assert info.bin_size == 2 * info.tokens == (corpus.path / f"{split}.bin").stat().st_size
    size = sum(len(text.encode()) for text in texts)
    assert f"data: {size + 34:,} tokens written = {size:,} of text + 34 ends of documents" in lines


def test_unigram_entropy_and_largest_id(tmp_path: Path, make_config: MakeConfig) -> None:
    texts = [*numbered(30), "ÿ" * 9]
    corpus = prepare(make_config(write_jsonl(tmp_path / "a.jsonl", texts)), say=silent)
    counts = Counter(token for document in documents_of(corpus, "train") for token in document)
    shares = [count / counts.total() for count in counts.values()]
    assert corpus.unigram_entropy == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-12)
    assert corpus.largest_id == 256


def test_empty_documents_are_skipped_and_counted(tmp_path: Path, make_config: MakeConfig) -> None:
    texts = ["", " \n\t\u2003", *numbered(20), "\n"]
    lines: list[str] = []
    corpus = prepare(make_config(write_jsonl(tmp_path / "a.jsonl", texts)), say=lines.append)
    assert corpus.empty == 3
    assert corpus.train.documents + corpus.validation.documents == 20
    assert "skipped 3 empty and 0 unreadable" in lines[-1]


def test_text_that_the_tokenizer_leaves_nothing_of_is_empty(
    tmp_path: Path, make_config: MakeConfig, bpe_file: Path
) -> None:
    description = json.loads(bpe_file.read_text(encoding="utf-8"))
    description["normalizer"] = {"type": "Replace", "pattern": {"String": "#"}, "content": ""}
    (tmp_path / "t.json").write_text(json.dumps(description))
    source = write_jsonl(tmp_path / "a.jsonl", ["###", *numbered(20)])
    corpus = prepare(make_config(source, tokenizer=str(tmp_path / "t.json")), say=silent)
    assert (corpus.empty, corpus.train.documents + corpus.validation.documents) == (1, 20)


def test_all_empty_is_an_error_with_the_path(tmp_path: Path, make_config: MakeConfig) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["", "  "])
    with pytest.raises(DataError, match=rf"{path} has no text: 2 empty or white-space documents, 0 unreadable"):
        prepare(make_config(path), say=silent)
    assert not [p for p in (tmp_path / "prepared").iterdir() if not p.name.endswith(".lock")]


def test_one_document_can_not_be_split(tmp_path: Path, make_config: MakeConfig) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["alone"])
    with pytest.raises(
        DataError, match=r"has 1 usable document.* 0 fall to training and 1 to validation; each needs one"
    ):
        prepare(make_config(path), say=silent)


def test_bad_lines_stop_or_are_skipped_up_to_the_limit(tmp_path: Path, make_config: MakeConfig) -> None:
    good = [json.dumps({"text": text}) for text in numbered(30)]
    bad = ['{"text": "cut', '{"text": 3}', '{"text": null}']
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([good[0], bad[0], *good[1:20], bad[1], *good[20:], bad[2]]))
    with pytest.raises(DataError, match=rf"^{path}:2: not JSON: .*data\.max_bad_documents is 0: mend it"):
        prepare(make_config(path), say=silent)
    with pytest.raises(DataError, match=rf"^{path}:33: field 'text' is a JSON null.*unreadable document 3.*=3 or more"):
        prepare(make_config(path, max_bad_documents=2), say=silent)
    lines: list[str] = []
    corpus = prepare(make_config(path, max_bad_documents=3), say=lines.append)
    assert [one.origin for one in corpus.bad] == [f"{path}:2", f"{path}:22", f"{path}:33"]
    assert corpus.bad[1].reason == "field 'text' is a JSON number, not a string"
    assert f"data: skipped {path}:22: field 'text' is a JSON number, not a string" in lines
    assert corpus.train.documents + corpus.validation.documents == 30
    with pytest.raises(DataError, match=rf"^{path}:2: not JSON"):  # found prepared, but by a more patient run
        prepare(make_config(path), say=silent)


def test_id_type_follows_the_vocabulary(tmp_path: Path, make_config: MakeConfig, large_vocabulary_file: Path) -> None:
    from data.writing import id_dtype

    assert [id_dtype(size) for size in (257, 65_499, 65_500, 70_000)] == [np.uint16, np.uint16, np.int32, np.int32]
    texts = [f"w{i} w{69_000 + i} w65535 w65536" for i in range(40)]
    config = make_config(write_jsonl(tmp_path / "a.jsonl", texts), tokenizer=str(large_vocabulary_file))
    corpus = prepare(config, say=silent)
    assert (corpus.dtype, corpus.vocab_size, corpus.eod, corpus.largest_id) == ("int32", 70_000, 69_999, 69_999)
    documents = documents_of(corpus, "train") + documents_of(corpus, "validation")
    assert sorted(documents) == [[i, 69_000 + i, 65_535, 65_536, 69_999] for i in range(40)]


# What is reused and what is made anew


def test_same_source_is_reused_and_a_changed_one_is_new(
    tmp_path: Path, make_config: MakeConfig, bpe_file: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered(30))
    config = make_config(path)
    first = prepare(config, say=silent)
    written = (first.path / "train.bin").stat().st_mtime_ns
    lines: list[str] = []
    assert prepare(config, say=lines.append) == first
    assert (first.path / "train.bin").stat().st_mtime_ns == written
    assert lines[0].startswith("data: reusing a-")
    others = [
        prepare(dataclasses.replace(config, tokenizer=str(bpe_file)), say=silent),
        prepare(dataclasses.replace(config, validation_share=0.2), say=silent),
    ]
    write_jsonl(path, numbered(31))
    others.append(prepare(config, say=silent))
    assert len({corpus.path for corpus in [first, *others]}) == 4
    assert len({corpus.hash for corpus in [first, *others]}) == 4
    assert {corpus.path.parent for corpus in others} == {first.path.parent}


def test_same_content_elsewhere_has_the_same_hash(tmp_path: Path, make_config: MakeConfig) -> None:
    one = prepare(make_config(write_jsonl(tmp_path / "a.jsonl", numbered(30))), say=silent)
    (tmp_path / "sub").mkdir()
    two = prepare(make_config(write_jsonl(tmp_path / "sub" / "a.jsonl", numbered(30))), say=silent)
    assert one.path != two.path
    assert one.hash == two.hash
    assert one.source.hash == two.source.hash


def test_a_prepared_folder_is_opened_with_its_own_tokenizer_only(
    tmp_path: Path, make_config: MakeConfig, bpe_file: Path
) -> None:
    made = prepare(make_config(write_jsonl(tmp_path / "a.jsonl", numbered(30)), tokenizer=str(bpe_file)), say=silent)
    own = made.path / "tokenizer.json"
    assert own.read_bytes() == bpe_file.read_bytes()
    assert prepare(make_config(made.path, tokenizer=str(own)), say=silent) == made
    with pytest.raises(DataError, match=rf"data\.tokenizer is byte, which makes other ids\. Set data\.tokenizer={own}"):
        prepare(make_config(made.path), say=silent)


def test_a_damaged_prepared_corpus_is_not_used(tmp_path: Path, make_config: MakeConfig) -> None:
    config = make_config(write_jsonl(tmp_path / "a.jsonl", numbered(30)))
    corpus = prepare(config, say=silent)
    with (corpus.path / "train.bin").open("ab") as stream:
        stream.truncate(10)
    for again in (config, make_config(corpus.path)):
        with pytest.raises(DataError, match=r"train\.bin is damaged: it has 10 bytes"):
            prepare(again, say=silent)


def test_a_source_folder_may_have_a_manifest_of_its_own(tmp_path: Path, make_config: MakeConfig) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    write_jsonl(folder / "a.jsonl", numbered(30))
    corpus = prepare(make_config(folder), say=silent)
    assert (corpus.source.kind, corpus.source.ignored_files) == ("jsonl", 1)


def test_manifest_lists_the_source(tmp_path: Path, make_config: MakeConfig) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered(30))
    manifest = json.loads((prepare(make_config(path), say=silent).path / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("indexed corpus", 1)
    (file,) = manifest["source"]["files"]
    assert (file["name"], file["size"]) == ("a.jsonl", path.stat().st_size)
    assert manifest["tokenizer"] == "byte"
    assert "path" not in manifest


def test_text_and_parquet_go_the_same_way(tmp_path: Path, make_config: MakeConfig) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = numbered(30)
    wanted = prepare(make_config(write_jsonl(tmp_path / "a.jsonl", texts)), say=silent)
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    (tmp_path / "text").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "text" / f"{i:03}.txt").write_text(text)
    for source in (tmp_path / "a.parquet", tmp_path / "text"):
        assert prepare(make_config(source), say=silent).hash == wanted.hash


def test_binaries_of_megatron_go_the_same_way(tmp_path: Path, make_config: MakeConfig) -> None:
    wanted = prepare(make_config(write_jsonl(tmp_path / "a.jsonl", numbered(30))), say=silent)
    for name in ("train", "validation"):
        for end in ("bin", "idx"):
            (tmp_path / "given").mkdir(exist_ok=True)
            (tmp_path / "given" / f"{name}.{end}").write_bytes((wanted.path / f"{name}.{end}").read_bytes())
    corpus = prepare(make_config(tmp_path / "given"), say=silent)
    for split in ("train", "validation"):  # the text decides what is held out, so it is the same again
        assert sorted(documents_of(corpus, split)) == sorted(documents_of(wanted, split))
        assert getattr(corpus, split).bytes == getattr(wanted, split).bytes


def test_binaries_of_another_vocabulary_are_refused(
    tmp_path: Path, make_config: MakeConfig, large_vocabulary_file: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [f"w{i} w69000" for i in range(30)])
    made = prepare(make_config(source, tokenizer=str(large_vocabulary_file)), say=silent)
    with pytest.raises(
        DataError, match=r"train\.bin:1: holds id 69000, and the ids of tokenizer byte run from 0 to 256"
    ):
        prepare(make_config(made.path / "train.idx"), say=silent)


# Whole or nothing


def test_a_full_disk_leaves_nothing_that_is_read_and_what_is_whole_is_kept(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(write_jsonl(tmp_path / "a.jsonl", numbered(30)))

    def fail(*_: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    for module, name, kept in ((data.parts, "flush", 0), (data.prepare, "write_manifest", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fail)
            with pytest.raises(DataError, match=r"can't write .*No space left on device\. Free space there"):
                prepare(config, say=silent)
        left = [p for p in (tmp_path / "prepared").iterdir() if p.is_dir()]
        assert [p.name[0] for p in left] == ["."] * kept
    lines: list[str] = []
    prepare(config, say=lines.append)
    assert "1 of 1 parts are there already" in lines[0]
    assert [p.name[0] for p in (tmp_path / "prepared").iterdir() if p.is_dir()] == ["a"]


def test_a_prepared_folder_that_can_not_be_written(tmp_path: Path, make_config: MakeConfig) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered(30))
    (tmp_path / "file").touch()
    config = dataclasses.replace(make_config(path), prepared=str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"data\.prepared: can't write in .*Set data\.prepared to a folder"):
        prepare(config, say=silent)


def test_a_file_system_without_locks(tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = write_jsonl(tmp_path / "a.jsonl", numbered(30))
    with pytest.raises(
        DataError, match=rf"can't lock files in {tmp_path}/prepared: No locks available\. Set data\.prep"
    ):
        prepare(make_config(path), say=silent)


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, make_config: MakeConfig) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered(200, size=100_000))
    tracemalloc.start()
    try:
        prepare(make_config(path, processes=1), say=silent)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 20e6
    assert peak < 15e6


def test_builtin_corpus(make_config: MakeConfig) -> None:
    start = time.process_time()
    corpus = prepare(make_config("builtin", validation_share=0.02), say=silent)
    assert time.process_time() - start < 10
    assert corpus.train.tokens > 4e6
    assert corpus.validation.tokens > 10_000
    assert corpus.train.documents + corpus.validation.documents + corpus.empty == len(corpus.source.files)
    assert 2.5 < corpus.unigram_entropy < 4
    assert not corpus.bad
