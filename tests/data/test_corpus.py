"""What a manifest promises is checked before anything is read; vocabulary and bits a byte."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from data.config import DataError
from data.corpus import Corpus, bits_per_byte, check_vocabulary, open_corpus
from data.prepare import prepare
from tests.data.conftest import MakeConfig, numbered, write_jsonl


@pytest.fixture
def corpus(tmp_path: Path, make_config: MakeConfig) -> Corpus:
    return prepare(make_config(write_jsonl(tmp_path / "a.jsonl", numbered(40))), say=lambda line: None)


def test_opens_to_what_was_prepared(corpus: Corpus, tmp_path: Path) -> None:
    assert open_corpus(corpus.path) == corpus
    moved = corpus.path.rename(tmp_path / "elsewhere")
    assert open_corpus(moved).hash == corpus.hash
    assert open_corpus(moved).path == moved


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "validation.bin", "validation.idx"])
def test_a_file_of_another_size_is_damaged(corpus: Corpus, name: str) -> None:
    file = corpus.path / name
    content = file.read_bytes()
    for damaged in (content[:-1], content + b"\0"):
        file.write_bytes(damaged)
        words = rf"{file} is damaged: it has {len(damaged)} bytes, the manifest says {len(content)}\. Delete"
        with pytest.raises(DataError, match=words):
            open_corpus(corpus.path)
    file.unlink()
    with pytest.raises(DataError, match=rf"can't read {file}: No such file"):
        open_corpus(corpus.path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is damaged"),
        ('{"format": "indexed corpus", "version": 1', "is damaged"),
        ('{"format": "indexed corpus", "version": 1}', "is damaged: 'source'"),
        ('{"format": "indexed corpus", "version": 99}', "is of format version 99; this code reads version 1"),
        ('{"name": "of something else"}', "is not the manifest of a prepared corpus"),
        ("[]", "is not the manifest of a prepared corpus"),
    ],
)
def test_damaged_manifest(corpus: Corpus, content: str, words: str) -> None:
    (corpus.path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=words):
        open_corpus(corpus.path)


def test_unknown_or_missing_manifest_fields(corpus: Corpus) -> None:
    manifest = json.loads((corpus.path / "manifest.json").read_text())
    (corpus.path / "manifest.json").write_text(json.dumps({**manifest, "more": 1}))
    with pytest.raises(DataError, match=r"is damaged: .*more"):
        open_corpus(corpus.path)
    (corpus.path / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"can't read .*manifest\.json: No such file"):
        open_corpus(corpus.path)


def test_vocabulary_of_the_model_holds_every_id(corpus: Corpus) -> None:
    check_vocabulary(corpus, 257)
    check_vocabulary(corpus, 300)
    with pytest.raises(DataError) as raised:
        check_vocabulary(corpus, 256)
    message = str(raised.value)
    assert "model.vocab_size is 256, so ids run from 0 to 255" in message
    assert "the largest id in the data is 256, the end-of-document token is 256" in message
    assert "Set model.vocab_size=257 or more" in message


def test_added_tokens_count_even_where_the_data_has_none(
    tmp_path: Path, make_config: MakeConfig, bpe_file: Path
) -> None:
    config = make_config(write_jsonl(tmp_path / "b.jsonl", numbered(40)), tokenizer=str(bpe_file))
    corpus = prepare(config, say=lambda line: None)
    assert corpus.eod == 1
    assert corpus.largest_id < corpus.vocab_size - 1
    check_vocabulary(corpus, corpus.vocab_size)
    with pytest.raises(DataError, match=rf"largest id, added tokens included, is {corpus.vocab_size - 1}\. Set"):
        check_vocabulary(corpus, corpus.vocab_size - 1)


def test_bits_per_byte(corpus: Corpus) -> None:
    # A uniform guess over 257 ids; one token more than bytes a document, and of the validation split alone.
    split = corpus.validation
    assert split.tokens == split.bytes + split.documents
    wanted = math.log2(257) * (split.bytes + split.documents) / split.bytes
    other = dataclasses.replace(corpus, train=dataclasses.replace(corpus.train, tokens=1))
    assert bits_per_byte(math.log(257), other) == pytest.approx(wanted, rel=1e-12)
