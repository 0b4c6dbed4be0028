"""Writes one split as Megatron's indexed binary, and counts what it writes."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.corpus import SplitInfo
from data.quiet import quiet
from data.tokenizers import Ids

COUNT_AT_ONCE = 1 << 18


def id_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The narrowest type of Megatron's that holds every id of a vocabulary: uint16, or int32 from 65500 ids on."""
    with quiet():
        from megatron.core.datasets.indexed_dataset import DType
    dtype: type[np.uint16] | type[np.int32] = DType.optimal_dtype(vocab_size)
    return dtype


class SplitWriter:
    """Documents go in one by one, each followed by the end-of-document token; `finish` checks files against counts."""

    def __init__(self, prefix: Path, dtype: type[np.uint16] | type[np.int32], vocab_size: int, eod: int) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.documents = 0
        self._prefix = prefix
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._eod = np.array([eod], dtype=dtype)
        self._builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        self._text_tokens = 0
        self._bytes = 0
        self._digest = hashlib.sha256()
        self._counts: npt.NDArray[np.int64] = np.zeros(vocab_size, dtype=np.int64)
        self._uncounted: list[npt.NDArray[np.uint16] | npt.NDArray[np.int32]] = []
        self._num_uncounted = 0

    def add(self, ids: Ids, num_bytes: int) -> None:
        """Appends one document: `ids` of its text, of `num_bytes` UTF-8 bytes."""
        assert ids.size > 0, "a document without a token"
        in_vocabulary = int(ids.min()) >= 0 and int(ids.max()) < self._vocab_size
        assert in_vocabulary, f"ids outside the tokenizer's vocabulary of {self._vocab_size}"
        stored = np.concatenate([ids.astype(self._dtype), self._eod])
        self._builder.add_document(stored, [stored.size])
        self._digest.update(stored)
        self.documents += 1
        self._text_tokens += ids.size
        self._bytes += num_bytes
        self._uncounted.append(stored)
        self._num_uncounted += stored.size
        if self._num_uncounted >= COUNT_AT_ONCE:
            self._count()

    def finish(self) -> SplitInfo:
        """Writes the index and reads it back: tokens in the files = tokens of text + one a document."""
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self._builder.finalize(f"{self._prefix}.idx")
        with quiet():
            written = IndexedDataset(str(self._prefix))
        tokens = int(written.sequence_lengths.sum(dtype=np.int64))
        bin_size, idx_size = (Path(f"{self._prefix}.{end}").stat().st_size for end in ("bin", "idx"))
        assert len(written) == self.documents, f"{len(written)} documents written of {self.documents}"
        assert tokens == self._text_tokens + self.documents, (
            f"{tokens} tokens written of {self._text_tokens} + {self.documents}"
        )
        assert bin_size == tokens * np.dtype(self._dtype).itemsize, f"{bin_size} bytes written for {tokens} tokens"
        return SplitInfo(self.documents, tokens, self._bytes, bin_size, idx_size, self._digest.hexdigest())

    def largest_id(self) -> int:
        """The largest id written so far."""
        self._count()
        return int(np.flatnonzero(self._counts)[-1])

    def unigram_entropy(self) -> float:
        """Entropy of the frequencies of the ids written so far, in nats a token."""
        self._count()
        shares = self._counts[self._counts > 0] / self._counts.sum()
        return math.fsum(-shares * np.log(shares))

    def _count(self) -> None:
        if self._uncounted:
            self._counts += np.bincount(np.concatenate(self._uncounted), minlength=self._vocab_size)
            self._uncounted, self._num_uncounted = [], 0
