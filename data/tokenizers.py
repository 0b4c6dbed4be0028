"""From text to ids: bytes, any file of the `tokenizers` library or of SentencePiece, or the tokenizer of a hub's model.

A tokenizer here turns whole documents into ids and adds nothing: no begin, no padding, no truncation, whatever the
file sets. The end-of-document token `eod` is put after each document by whoever prepares, and text can't forge it:
special tokens that are written out in a document are encoded as the characters they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from data.config import DataError
from data.hub import download_tokenizer, is_hub
from data.refusals import why

BYTE = "byte"
SENTENCEPIECE = ".model"
EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|endofdocument|>", "<|eos|>", "</s>", "<eos>", "[EOS]")

Ids = npt.NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """What preparation needs of a tokenizer.

    Attributes:
        name: `byte` or the path of its file.
        hash: of everything that decides its ids; travels with the data.
        vocab_size: one more than the largest id it can make, special and added tokens included.
        eod: id of the end-of-document token.
    """

    name: str
    hash: str
    vocab_size: int
    eod: int

    def encode(self, text: str) -> Ids:
        """Ids of one text, without `eod`, by one thread."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens left out."""


class ByteTokenizer:
    """UTF-8 bytes are the ids 0 to 255; 256 ends a document."""

    name = BYTE
    hash = hashlib.sha256(b"utf-8 bytes, eod 256").hexdigest()
    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Ids cut out of the middle of a text may begin or end inside a character: such bytes become U+FFFD."""
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library; `eod` is the first of EOD_TOKENS that is special in it."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        self.name = str(path)
        content = _read(path)
        self.hash = hashlib.sha256(content).hexdigest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"data.tokenizer: {path} is not a file of the `tokenizers` library ({error}). Give a tokenizer.json, "
                "or `byte`."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eod = self._find_eod(path)

    def encode(self, text: str) -> Ids:
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)  # `encode` finds places too
        return np.array(encoded.ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def _find_eod(self, path: Path) -> int:
        special = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        for token in EOD_TOKENS:
            if token in special:
                return special[token]
        has = ", ".join(sorted(special)[:8]) or "none"
        raise DataError(
            f"data.tokenizer: {path} has no special token that ends a document: looked for {' '.join(EOD_TOKENS)}, "
            f"its special tokens are {has}. Add one of these to the file as a special token."
        )


class SentencePieceTokenizer:
    """A .model file of SentencePiece; `eod` is its end-of-sentence id. Its control symbols can't be made from text."""

    def __init__(self, path: Path) -> None:
        import sentencepiece

        self.name = str(path)
        content = _read(path)
        self.hash = hashlib.sha256(content).hexdigest()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except RuntimeError as error:
            raise DataError(
                f"data.tokenizer: {path} is not a file of SentencePiece ({error}). Give its .model file, a "
                "tokenizer.json, or `byte`."
            ) from error
        self.vocab_size = int(self._processor.vocab_size())
        self.eod = int(self._processor.eos_id())
        if self.eod < 0:
            raise DataError(
                f"data.tokenizer: {path} has no end-of-sentence id, which would end a document. Train it with "
                "--eos_id=1 or another id."
            )

    def encode(self, text: str) -> Ids:
        return np.array(self._processor.encode(text, out_type=int), dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._processor.decode([int(i) for i in ids if not self._processor.IsControl(int(i))]))


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Raises:
        DataError: the file is not there or can't be fetched, is no tokenizer's, or has no token that ends a document.
    """
    if name == BYTE:
        return ByteTokenizer()
    path = tokenizer_path(name)
    return SentencePieceTokenizer(path) if path.suffix == SENTENCEPIECE else FileTokenizer(path)


def tokenizer_hash(name: str) -> str:
    """The hash of the tokenizer `name`, without loading it. Raises DataError if its file can't be read."""
    return ByteTokenizer.hash if name == BYTE else hashlib.sha256(_read(tokenizer_path(name))).hexdigest()


def tokenizer_path(name: str) -> Path:
    """The file that `data.tokenizer` names, if it is there."""
    if is_hub(name):
        return download_tokenizer(name)
    path = Path(name).expanduser().absolute()
    try:
        is_folder, is_file = (path / "tokenizer.json").is_file(), path.is_file()
    except PermissionError as error:
        raise _unreadable(path, error) from error
    if is_folder:
        raise DataError(f"data.tokenizer: {path} is a folder; write {path / 'tokenizer.json'}.")
    if not is_file:
        raise DataError(
            f"data.tokenizer: there is no file {path}. Copy the tokenizer.json of the model you want there (each model "
            "repository of the Hugging Face hub holds one), write hub:NAME to fetch it, train it (`prepare` with these "
            f"settings and tokenizer.train={path}), or use `byte`, which needs no file."
        )
    return path


def copy_name(name: str) -> str:
    """The name of a tokenizer's file in a prepared corpus."""
    return f"tokenizer{SENTENCEPIECE if name.endswith(SENTENCEPIECE) else '.json'}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"data.tokenizer: can't read {path}: {why(error, path)}. Make it readable for this user.")
