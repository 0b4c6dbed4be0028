"""Rows of one length from a prepared corpus, epoch after epoch.

The rows of an epoch and their order are a function of (corpus, seed, number of the epoch, sequence length, packing):
not of how long a run is, nor of what else it reads. An epoch's index is made when its first row is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from data.config import BEST_FIT, CONCATENATE
from data.corpus import TRAIN, Corpus
from data.packing import Packed, pack
from data.quiet import quiet

VALIDATION_SEED = 1
EPOCHS_KEPT = 2  # indices in memory: readers in several processes cross the border of an epoch at different times

Row = dict[str, npt.NDArray[Any]]


class Samples(Protocol):
    """A source's rows of one split: `row(i)` for any i from 0 on in training, below `per_epoch` in validation."""

    per_epoch: int

    def row(self, index: int) -> Row:
        """`tokens`, `labels` int64, `loss_mask` float32, each [sequence length]; `documents` int32 where kept apart."""

    def waste(self) -> float:
        """Share of the places of a row that hold no token."""


def open_samples(corpus: Corpus, split: str, length: int, seed: int, packing: str) -> Samples:
    """The rows of one split. Validation has one order for all runs: give VALIDATION_SEED."""
    if packing == BEST_FIT:
        return PackedSamples(corpus, split, length, seed)
    return JoinedSamples(corpus, split, length, seed, apart=packing != CONCATENATE)


def epoch_seed(seed: int, epoch: int) -> int:
    """Seed below 2^32 of an epoch's order; the first epoch's is the run's own."""
    if epoch == 0:
        return seed % 2**32
    return int.from_bytes(hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest(), "big")


@dataclass(frozen=True)
class _Vocabulary:
    """What GPTDataset asks of a tokenizer."""

    vocab_size: int
    eod: int
    unique_identifiers: dict[str, str]
    pad: int = -1


class _Stored:
    """The token ids of a split on disk: one array, and where each document begins and ends in it."""

    def __init__(self, corpus: Corpus, split: str) -> None:
        with quiet():
            from megatron.core.datasets.indexed_dataset import IndexedDataset

            self._opened = IndexedDataset(corpus.prefix(split))  # its arrays are views of a file that it closes
        index = self._opened.index
        ids = np.memmap(f"{corpus.prefix(split)}.bin", dtype=index.dtype, mode="r")
        self.ids = ids.view(np.ndarray)  # slices of a memmap are ten times as slow
        self.lengths = index.sequence_lengths
        self.starts = index.sequence_pointers // np.dtype(index.dtype).itemsize


class JoinedSamples:
    """Documents joined end to end, each with its end, and cut into rows: Megatron's GPTDataset, an epoch at a time.

    `apart`: the model is told where documents begin, and the first token of a document is no target, because nothing
    that the model may see foretells it.
    """

    def __init__(self, corpus: Corpus, split: str, length: int, seed: int, *, apart: bool) -> None:
        self._corpus, self._split, self._length, self._seed, self._apart = corpus, split, length, seed, apart
        tokens = (corpus.train if split == TRAIN else corpus.validation).tokens
        # The rest of an epoch of training, shorter than a row, is left out; that of validation is padded.
        self.per_epoch = (tokens - 1) // length if split == TRAIN else -(-(tokens - 1) // length)
        self._stored = _Stored(corpus, split)
        self._index: Callable[[int], Any] = lru_cache(EPOCHS_KEPT)(self._make_index)

    def _make_index(self, epoch: int) -> Any:
        """Megatron's dataset of one epoch: which document stands where, where rows begin, their random order."""
        with quiet():
            from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
            from megatron.core.datasets.utils import Split

            corpus, prefix = self._corpus, self._corpus.prefix(self._split)
            config = GPTDatasetConfig(
                random_seed=epoch_seed(self._seed, epoch),
                sequence_length=self._length,
                blend=([prefix], None),
                split="1,0,0",  # each split has binaries of its own, so Megatron splits nothing
                tokenizer=_Vocabulary(corpus.vocab_size, corpus.eod, {"hash": corpus.tokenizer_hash}),
                reset_position_ids=False,
                reset_attention_mask=False,
                eod_mask_loss=False,
                create_attention_mask=False,
                drop_last_partial_validation_sequence=False,
                path_to_cache="",  # no cache on disk; None would be one inside the corpus
            )
            binary = GPTDataset.build_low_level_dataset(prefix, config)
            documents = np.arange(len(binary), dtype=np.int32)
            kind = Split.train if self._split == TRAIN else Split.valid
            index = GPTDataset(binary, prefix, documents, None, kind, config)
        assert len(index.shuffle_index) == self.per_epoch, f"{len(index.shuffle_index)} rows of {self.per_epoch}"
        return index

    def stream(self, index: int) -> npt.NDArray[np.int64]:
        """The tokens of a row and the one after it: [length + 1], fewer at the end of validation."""
        epoch, place = divmod(index, self.per_epoch)
        made, stored = self._index(epoch), self._stored
        sample = made.shuffle_index[place]
        (first, offset), (last, end) = made.sample_index[sample].tolist(), made.sample_index[sample + 1].tolist()
        documents = made.document_index[first : last + 1]
        starts = stored.starts[documents]
        stops = starts + stored.lengths[documents]
        stops[-1] = min(int(starts[-1]) + end + 1, int(stops[-1]))
        starts[0] += offset
        pieces = [stored.ids[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        return np.concatenate(pieces, dtype=np.int64)

    def row(self, index: int) -> Row:
        stream = self.stream(index)
        valid = len(stream) - 1
        if valid < self._length:
            stream = np.concatenate([stream, np.zeros(self._length - valid, dtype=np.int64)])
        tokens, labels = stream[:-1], stream[1:]
        mask = np.ones(self._length, dtype=np.float32)
        mask[valid:] = 0
        row: Row = {"tokens": tokens, "labels": labels, "loss_mask": mask}
        if self._apart:
            ends = tokens == self._corpus.eod  # text can't hold this id, so an end it is
            mask[ends] = 0
            row["documents"] = (np.cumsum(ends) - ends).astype(np.int32)
        return row

    def waste(self) -> float:
        return 0.0


class PackedSamples:
    """Whole documents in rows, kept apart; what is left of a row is padding, which is a document of its own and no
    target. Every token of a document but its first is a target once an epoch, its end included."""

    def __init__(self, corpus: Corpus, split: str, length: int, seed: int) -> None:
        self._eod, self._length, self._seed = corpus.eod, length, seed
        self._stored = _Stored(corpus, split)
        self._index: Callable[[int], Packed] = lru_cache(EPOCHS_KEPT)(self._make_index)
        self.per_epoch = len(self._index(0).starts) - 1

    def _make_index(self, epoch: int) -> Packed:
        return pack(self._stored.lengths, self._length, epoch_seed(self._seed, epoch))

    def row(self, index: int) -> Row:
        epoch, place = divmod(index, self.per_epoch)
        made, stored, length = self._index(epoch), self._stored, self._length
        pieces = slice(made.starts[place], made.starts[place + 1])
        starts = stored.starts[made.documents[pieces]] + made.offsets[pieces]
        sizes = made.sizes[pieces].tolist()
        spans = [stored.ids[start : start + size + 1] for start, size in zip(starts.tolist(), sizes, strict=True)]
        padding = length - sum(sizes)
        fill = np.full(padding, self._eod, dtype=np.int64)
        mask = np.ones(length, dtype=np.float32)
        mask[length - padding :] = 0
        return {
            "tokens": np.concatenate([*(span[:-1] for span in spans), fill], dtype=np.int64),
            "labels": np.concatenate([*(span[1:] for span in spans), fill], dtype=np.int64),
            "loss_mask": mask,
            "documents": np.repeat(np.arange(len(sizes) + 1, dtype=np.int32), [*sizes, padding]),
        }

    def waste(self) -> float:
        return self._index(0).waste
