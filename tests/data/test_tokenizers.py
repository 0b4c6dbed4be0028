"""Ids are the library's for the text alone; the end-of-document token is found, and can't be forged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from data.config import DataError
from data.tokenizers import ByteTokenizer, load_tokenizer, tokenizer_hash


def test_byte_tokenizer() -> None:
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("aü\x00").tolist() == [97, 0xC3, 0xBC, 0]
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.decode([97, 0xC3, 0xBC, 256, 98]) == "aüb"
    assert tokenizer.decode([0xBC, 98]) == "\ufffdb"
    assert tokenizer.hash == tokenizer_hash("byte")


def test_file_tokenizer_gives_the_ids_of_the_text_alone(bpe_file: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_file))
    library = Tokenizer.from_file(str(bpe_file))
    library.no_truncation()
    library.no_padding()
    text = "the quick brown fox " * 30
    ids = tokenizer.encode(text)
    assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
    assert len(ids) > 8  # the file asks for truncation to 8, and for a begin token
    assert tokenizer.encode("a").size == 1
    assert tokenizer.decode(np.append(ids, tokenizer.eod)) == text
    assert tokenizer.hash == tokenizer_hash(str(bpe_file)) != ByteTokenizer.hash


def test_added_tokens_count_for_the_vocabulary(bpe_file: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_file))
    added = tokenizer.encode("ADDED").tolist()
    assert added == [tokenizer.vocab_size - 1]
    assert tokenizer.eod == 1


def test_a_document_that_spells_out_the_end_token_does_not_end(bpe_file: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_file))
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_missing_file_says_which_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"there is no file {tmp_path}/t\.json\. Copy the tokenizer\.json .*write hub:NAME"
    ):
        load_tokenizer(str(tmp_path / "t.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=rf"is a folder; write {tmp_path}/tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", ["", "{}", "some text", '{"version": "1.0", "model": {"type": "Nothing"}}'])
def test_not_a_tokenizers_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(DataError, match=rf"{path} is not a file of the `tokenizers` library"):
        load_tokenizer(str(path))


def test_no_end_of_document_token(tmp_path: Path, bpe_file: Path) -> None:
    description = json.loads(bpe_file.read_text(encoding="utf-8"))
    for token in description["added_tokens"]:
        token["special"] = token["content"] == "<|begin|>"
    path = tmp_path / "t.json"
    path.write_text(json.dumps(description))
    with pytest.raises(DataError, match=r"looked for <\|endoftext\|> .*its special tokens are <\|begin\|>\. Add one"):
        load_tokenizer(str(path))
