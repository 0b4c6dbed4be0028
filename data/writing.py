"""Writes token ids: documents of a part one by one, and whole splits from parts, as Megatron's indexed binaries.

The index is written here because Megatron's builder keeps a Python object for every document, and because a part is
then prepared without importing it, which takes longer than many a part. Megatron reads the result (`data.samples`).
"""

from __future__ import annotations

import hashlib
import shutil
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from data.tokenizers import Ids

BUFFER = 1 << 20
COUNT_AT_ONCE = 1 << 18
# Megatron's numbers for the types of ids.
TYPE_CODES: dict[type[np.integer[Any]], int] = {np.int32: 4, np.uint16: 8}


def id_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The narrowest type of Megatron's that holds every id of a vocabulary: uint16, or int32 from 65500 ids on."""
    return np.uint16 if vocab_size < 65500 else np.int32


class SplitWriter:
    """The documents of a part that fall to one split, each followed by the end-of-document token.

    Attributes:
        documents, tokens, bytes: written so far; tokens with the ends, bytes of the text.
        counts: [vocabulary] how often each id was written; whole after `finish`.
    """

    def __init__(self, path: Path, vocab_size: int, eod: int) -> None:
        dtype = id_dtype(vocab_size)
        self.documents = self.tokens = self.bytes = 0
        self.counts: npt.NDArray[np.int64] = np.zeros(vocab_size, dtype=np.int64)
        self._path, self._dtype, self._vocab_size = path, np.dtype(dtype), vocab_size
        self._eod: Ids = np.array([eod], dtype=dtype)
        self._file = path.with_suffix(".bin").open("wb", buffering=BUFFER)
        self._lengths = array("i")
        self._waiting: list[Ids] = []
        self._num_waiting = 0

    def add(self, ids: Ids, num_bytes: int) -> None:
        """Appends one document: `ids` of its text, of `num_bytes` UTF-8 bytes."""
        assert ids.size > 0, "a document without a token"
        self._lengths.append(ids.size + 1)
        self.documents += 1
        self.tokens += ids.size + 1
        self.bytes += num_bytes
        self._waiting += [ids, self._eod]
        self._num_waiting += ids.size + 1
        if self._num_waiting >= COUNT_AT_ONCE:
            self._write()

    def finish(self) -> None:
        """Writes what is left and the lengths of the documents, and checks the file's size."""
        self._write()
        self._file.close()
        np.save(self._path.with_suffix(".npy"), np.frombuffer(self._lengths, dtype=np.int32))
        size = self._path.with_suffix(".bin").stat().st_size
        assert size == self.tokens * self._dtype.itemsize, f"{size} bytes written for {self.tokens} tokens"

    def _write(self) -> None:
        if not self._waiting:
            return
        ids = np.concatenate(self._waiting, dtype=np.int64)
        in_vocabulary = int(ids.min()) >= 0 and int(ids.max()) < self._vocab_size
        assert in_vocabulary, f"ids outside the tokenizer's vocabulary of {self._vocab_size}"
        self.counts += np.bincount(ids, minlength=self._vocab_size)
        self._file.write(ids.astype(self._dtype).tobytes())
        self._waiting, self._num_waiting = [], 0


def join_binaries(parts: Iterable[Path], out: IO[bytes]) -> str:
    """Copies files of ids one behind another; returns the SHA-256 of all."""
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as stream:
            shutil.copyfileobj(_Hashed(stream, digest), out, BUFFER)
    return digest.hexdigest()


class _Hashed:
    """A stream whose bytes go through a hash as they are read."""

    def __init__(self, stream: IO[bytes], digest: Any) -> None:
        self._stream, self._digest = stream, digest

    def read(self, size: int = -1) -> bytes:
        block = self._stream.read(size)
        self._digest.update(block)
        return block


def write_index(path: Path, lengths: npt.NDArray[np.int32], dtype: type[np.uint16] | type[np.int32]) -> None:
    """The .idx file of documents of these lengths, each one sequence: Megatron's format, version 1."""
    pointers = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], out=pointers[1:])
    pointers *= np.dtype(dtype).itemsize
    with path.open("wb") as out:
        out.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, TYPE_CODES[dtype], len(lengths), len(lengths) + 1))
        for column in (lengths.astype(np.int32), pointers, np.arange(len(lengths) + 1, dtype=np.int64)):
            out.write(column.tobytes())
