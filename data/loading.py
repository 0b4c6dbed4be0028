"""From a prepared corpus to batches, through Megatron's GPTDataset.

Documents are joined end to end (each with its end-of-document token) and cut into samples of `sequence_length` tokens,
whose labels are the same tokens one place on. The order of training samples is a function of (corpus, seed, sequence
length, number of training samples): keep that number fixed for a whole run, as Megatron's order depends on the epochs
it makes. Position in it is a count of samples, so a resumed run continues exactly, on any number of ranks. Validation
samples come in one order for every run of a corpus, once each, the last one padded.

The indices are built in memory: a corpus may be read-only, and nothing is ever written to it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from data.config import DataConfig, DataError
from data.corpus import TRAIN, VALIDATION, Corpus
from data.quiet import quiet

if TYPE_CHECKING:
    import torch

VALIDATION_SEED = 1
PADDING = -1  # no id of any vocabulary, so that an end-of-document token stays a target
FIELDS = ("tokens", "labels", "loss_mask")

Batch = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Datasets:
    """What a run reads.

    Attributes:
        train, validation: Megatron's datasets; item i is a dict of `tokens`, `labels` (int64) and `loss_mask`
            (float32), each [sequence_length]. `validation[None]` is a sample without a valid token.
        train_samples: samples of the whole run.
        validation_samples: samples an evaluation scores: what was asked for, or all there are.
    """

    corpus: Corpus
    train: Any
    validation: Any
    sequence_length: int
    train_samples: int
    validation_samples: int

    @property
    def epochs(self) -> float:
        """How many times the run reads the training split."""
        return self.train_samples * self.sequence_length / self.corpus.train.tokens

    def describe(self) -> list[str]:
        """Lines for people: tokens, samples and epochs of the run; repetition, where there is some; validation."""
        split, held_out = self.corpus.train, self.corpus.validation
        lines = [
            f"data: {split.tokens:,} training tokens in {split.documents:,} documents; the run reads "
            f"{self.train_samples:,} samples of {self.sequence_length} = "
            f"{self.train_samples * self.sequence_length:,} tokens = {self.epochs:.2f} epochs"
        ]
        if self.epochs > 1:
            lines.append(
                f"data: the run is longer than the corpus: each document is read up to {math.ceil(self.epochs)} "
                "times, in a new order each time"
            )
        lines.append(
            f"data: {self.validation_samples:,} of {len(self.validation):,} validation samples a time (of "
            f"{held_out.tokens:,} tokens, {held_out.bytes:,} bytes held out)"
        )
        return lines


def build_datasets(
    corpus: Corpus, config: DataConfig, *, seed: int, train_samples: int, validation_samples: int
) -> Datasets:
    """Opens both splits of a corpus for a run.

    Args:
        corpus: what `prepare` or `open_corpus` gave.
        config: `sequence_length` is used.
        seed: of the order of training samples.
        train_samples: of the WHOLE run (steps * global batch), the same at every resume.
        validation_samples: an evaluation should score; capped at what the validation split holds.

    Raises:
        DataError: the training split is shorter than one sample.
    """
    length = config.sequence_length
    if corpus.train.tokens < length + 1:
        raise DataError(
            f"{corpus.path} has {corpus.train.tokens} training tokens, fewer than one sample: "
            f"data.sequence_length={length} and one more for the last label. Use more text, or "
            f"data.sequence_length={corpus.train.tokens - 1} or less."
        )
    validation = _gpt_dataset(corpus, VALIDATION, length, VALIDATION_SEED, None)
    return Datasets(
        corpus=corpus,
        train=_gpt_dataset(corpus, TRAIN, length, seed, train_samples),
        validation=validation,
        sequence_length=length,
        train_samples=train_samples,
        validation_samples=min(validation_samples, len(validation)),
    )


def train_batches(
    datasets: Datasets, config: DataConfig, *, consumed_samples: int, data_rank: int = 0, data_size: int = 1
) -> Iterator[Batch]:
    """Micro-batches of one data-parallel rank, from sample `consumed_samples` of the run to its end.

    A step takes global_batch / (micro_batch * data_size) of them. Micro-batch m of rank r holds the samples that stand
    at (m * data_size + r) * micro_batch and after in the global batch, so all ranks' micro-batches together are the
    same samples whatever their number.

    Yields:
        `tokens`, `labels` int64 and `loss_mask` float32, each [micro_batch, sequence_length].

    Raises:
        DataError: micro_batch * data_size does not divide global_batch.
    """
    _check_layout(config, data_size)
    if consumed_samples >= datasets.train_samples:
        return iter(())
    with quiet():
        from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    sampler = MegatronPretrainingSampler(
        total_samples=datasets.train_samples,
        consumed_samples=consumed_samples,
        micro_batch_size=config.micro_batch,
        data_parallel_rank=data_rank,
        data_parallel_size=data_size,
    )
    return _load(datasets.train, sampler, config.workers)


def validation_batches(
    datasets: Datasets, config: DataConfig, *, data_rank: int = 0, data_size: int = 1
) -> Iterator[Batch]:
    """Micro-batches of one rank over the first `validation_samples` of the validation order; the same number on every
    rank.

    All are [micro_batch, sequence_length]: the last are filled up with samples whose `loss_mask` is zero, so a
    micro-batch may hold no valid token at all, and losses are to be summed and divided by the sum of the masks.
    """
    wanted, micro = datasets.validation_samples, config.micro_batch
    starts = range(data_rank * micro, math.ceil(wanted / (micro * data_size)) * micro * data_size, micro * data_size)
    batches = [[i if i < wanted else None for i in range(start, start + micro)] for start in starts]
    return _load(datasets.validation, batches, workers=0)


def sample_digest(tokens: torch.Tensor | npt.ArrayLike) -> bytes:
    """16 bytes that stand for one sample's tokens [sequence_length]; what ranks exchange to hash a global batch."""
    return hashlib.blake2b(np.ascontiguousarray(tokens, dtype="<i8").tobytes(), digest_size=16).digest()


def combine(digests: Iterable[bytes]) -> str:
    """Short hash of a global batch from its samples' digests, in the order of the global batch."""
    return hashlib.blake2b(b"".join(digests), digest_size=8).hexdigest()


def batch_hash(samples: Iterable[torch.Tensor | npt.ArrayLike]) -> str:
    """Short hash of a step's global batch: the tokens of every sample, in order. The same under any layout."""
    return combine(sample_digest(tokens) for tokens in samples)


@dataclass(frozen=True)
class _Vocabulary:
    """What GPTDataset asks of a tokenizer."""

    vocab_size: int
    eod: int
    unique_identifiers: dict[str, str]
    pad: int = PADDING


def _gpt_dataset(corpus: Corpus, split: str, sequence_length: int, seed: int, num_samples: int | None) -> Any:
    """One split as Megatron's dataset; `num_samples` None is one epoch."""
    with quiet():
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.utils import Split

        prefix = corpus.prefix(split)
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=sequence_length,
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
        kind = Split.train if split == TRAIN else Split.valid
        dataset = GPTDataset(binary, prefix, documents, num_samples, kind, config)
    # Megatron would keep the first sample's loss mask for all that follow, padding included where that sample has some.
    dataset.masks_and_position_ids_are_cacheable = False
    return dataset


def _check_layout(config: DataConfig, data_size: int) -> None:
    unit = config.micro_batch * data_size
    if config.global_batch % unit:
        nearest = [n for n in (config.global_batch // unit * unit, -(-config.global_batch // unit) * unit) if n]
        raise DataError(
            f"data.global_batch={config.global_batch} is no multiple of data.micro_batch={config.micro_batch} times "
            f"{data_size} data-parallel ranks = {unit}. Nearest that fit: {' or '.join(map(str, nearest))}."
        )


def _load(dataset: Any, batches: Iterable[list[Any]], workers: int) -> Iterator[Batch]:
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=torch.cuda.is_available(),
        # The loader draws a seed when it starts; from the global generator that would change the random bits of a
        # resumed run.
        generator=torch.Generator().manual_seed(0),
    )
    return iter(loader)


def _collate(samples: list[dict[str, torch.Tensor]]) -> Batch:
    import torch

    return {field: torch.stack([sample[field] for sample in samples]) for field in FIELDS}
