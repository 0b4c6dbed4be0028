"""From prepared corpora to batches: which row of which source is which sample of a run.

The order of training samples is a function of seed, sources, packing and phases alone: `data.blending` says which
source a sample comes from and `data.samples` which row of it that is. Position is a count of samples, so a resumed run
continues exactly, on any number of ranks and workers. Validation samples come in one order for every run of a corpus,
once each, a source at a time.

The indices are built in memory: a corpus may be read-only, and nothing is ever written to it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from data.blending import Blend, Phase
from data.config import BEST_FIT, DataConfig, DataError, SourceConfig, check_weights
from data.corpus import TRAIN, VALIDATION, Corpus
from data.quiet import quiet
from data.samples import VALIDATION_SEED, Row, Samples, open_samples

if TYPE_CHECKING:
    import torch

Batch = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class OpenSource:
    """A source whose corpus is open. `validation_samples`: those an evaluation scores: what was asked for, or all."""

    name: str
    corpus: Corpus
    train: Samples
    validation: Samples
    validation_samples: int
    max_epochs: float | None = None


@dataclass(frozen=True)
class Datasets:
    """What a run reads.

    Attributes:
        sources: in the order of the configuration.
        blend: which of them gives which sample.
        train_samples: samples of the whole run.
        seed: of their order.
    """

    sources: tuple[OpenSource, ...]
    blend: Blend
    sequence_length: int
    packing: str
    train_samples: int
    seed: int

    def __len__(self) -> int:
        return self.train_samples

    def __getitem__(self, sample: int) -> Row:
        """A sample of the run, as `Samples.row` says."""
        source, index = self.blend.locate(sample)
        return self.sources[source].train.row(index)

    @property
    def shares(self) -> list[float]:
        """Each source's share of the samples of the whole run."""
        return [count / self.train_samples for count in self.blend.counts(self.train_samples)]

    def tokens_read(self, samples: int) -> dict[str, int]:
        """Tokens that each source has given when `samples` samples are read; of a blend alone."""
        if len(self.sources) == 1:
            return {}
        counts = self.blend.counts(samples)
        return {s.name: count * self.sequence_length for s, count in zip(self.sources, counts, strict=True)}

    @property
    def identity(self) -> dict[str, str]:
        """Hashes of the tokenizer and of every corpus: what travels with a checkpoint."""
        corpora = {f"source {source.name}": source.corpus.hash for source in self.sources}
        return {"tokenizer": self.sources[0].corpus.tokenizer_hash, **corpora}

    def describe(self) -> list[str]:
        """Lines for people: what the run reads of each source, repetition where there is some, phases, validation."""
        lines = []
        counts = self.blend.counts(self.train_samples)
        for source, samples, share in zip(self.sources, counts, self.shares, strict=True):
            lines += self._describe(source, samples, share)
        for phase in self.blend.phases if len(self.sources) > 1 else ():
            total = sum(phase.weights)
            mixed = ", ".join(f"{s.name} {w / total:.2%}" for s, w in zip(self.sources, phase.weights, strict=True))
            lines.append(f"data: from sample {phase.start:,} on: {mixed}")
        return lines

    def _describe(self, source: OpenSource, samples: int, share: float) -> list[str]:
        split, held_out, tokens = source.corpus.train, source.corpus.validation, samples * self.sequence_length
        several = len(self.sources) > 1
        prefix = f"data: {source.name}:" if several else "data:"
        epochs = samples / source.train.per_epoch
        part = f" ({share:.2%} of the run)" if several else ""
        lines = [
            f"{prefix} {split.tokens:,} training tokens in {split.documents:,} documents; the run reads "
            f"{samples:,} samples of {self.sequence_length} = {tokens:,} tokens = {epochs:.2f} epochs{part}"
        ]
        if epochs > 1:
            lines.append(
                f"{prefix} the run is longer than the corpus: each document is read up to {math.ceil(epochs)} "
                "times, in a new order each time"
            )
        if self.packing == BEST_FIT:
            lines.append(f"{prefix} best fit leaves {source.train.waste():.2%} of the places empty")
        lines.append(
            f"{prefix} {source.validation_samples:,} of {source.validation.per_epoch:,} validation samples a time (of "
            f"{held_out.tokens:,} tokens, {held_out.bytes:,} bytes held out)"
        )
        return lines


def build_datasets(
    corpora: Sequence[Corpus],
    config: DataConfig,
    *,
    seed: int,
    train_samples: int,
    validation_samples: int,
    phases: Sequence[Phase] = (),
) -> Datasets:
    """Opens the corpora of a run.

    Args:
        corpora: of `config.blended()`, in that order: what `prepare` or `open_corpus` gave.
        config: sources, packing and `sequence_length` are used.
        seed: of the order of training samples.
        train_samples: of the whole run (steps * global batch).
        validation_samples: an evaluation should score of each source; capped at what it holds.
        phases: changes of the weights after the first sample, in order.

    Raises:
        DataError: a training split shorter than one sample, weights that make no blend, a source that would be read
        more often than its `max_epochs`, sources of different tokenizers.
    """
    sources = config.blended()
    names = [source.name for source in sources]
    first = Phase(0, tuple(source.weight for source in sources))
    for phase in phases:
        check_weights(phase.weights, names, "data.phases")
    _check_tokenizers(corpora)
    opened = tuple(
        _open(source, corpus, config, seed, validation_samples) for source, corpus in zip(sources, corpora, strict=True)
    )
    datasets = Datasets(opened, Blend([first, *phases]), config.sequence_length, config.packing, train_samples, seed)
    _check_epochs(datasets)
    return datasets


def _open(source: SourceConfig, corpus: Corpus, config: DataConfig, seed: int, validation_samples: int) -> OpenSource:
    length = config.sequence_length
    if corpus.train.tokens < length + 1 and config.packing != BEST_FIT:
        raise DataError(
            f"{corpus.path} has {corpus.train.tokens} training tokens, fewer than one sample: "
            f"data.sequence_length={length} and one more for the last label. Use more text, or "
            f"data.sequence_length={corpus.train.tokens - 1} or less."
        )
    train = open_samples(corpus, TRAIN, length, seed, config.packing)
    validation = open_samples(corpus, VALIDATION, length, VALIDATION_SEED, config.packing)
    wanted = min(validation_samples, validation.per_epoch)
    return OpenSource(source.name, corpus, train, validation, wanted, source.max_epochs)


def _check_tokenizers(corpora: Sequence[Corpus]) -> None:
    for corpus in corpora[1:]:
        if corpus.tokenizer_hash != corpora[0].tokenizer_hash:
            raise DataError(
                f"data.sources: {corpora[0].path} was prepared with tokenizer {corpora[0].tokenizer} and {corpus.path} "
                f"with {corpus.tokenizer}: their ids mean different text. Prepare all with one tokenizer."
            )


def _check_epochs(datasets: Datasets) -> None:
    """Raises DataError where a source would be read more often than its cap."""
    for source, samples in zip(datasets.sources, datasets.blend.counts(datasets.train_samples), strict=True):
        epochs = samples / source.train.per_epoch
        if source.max_epochs is not None and epochs > source.max_epochs:
            raise DataError(
                f"data.sources: {source.name} would be read {epochs:.2f} times, above its max_epochs="
                f"{source.max_epochs:g} ({samples:,} samples, {source.train.per_epoch:,} an epoch). Lower its weight "
                f"to about {source.max_epochs / epochs:.3g} of what it is, give it more text, train fewer steps, or "
                "raise the cap."
            )


def train_batches(
    datasets: Datasets, config: DataConfig, *, consumed_samples: int, data_rank: int = 0, data_size: int = 1
) -> Iterator[Batch]:
    """Micro-batches of one data-parallel rank, from sample `consumed_samples` of the run to its end.

    A step takes global_batch / (micro_batch * data_size) of them. Micro-batch m of rank r holds the samples that stand
    at (m * data_size + r) * micro_batch and after in the global batch, so all ranks' micro-batches together are the
    same samples whatever their number.

    Yields:
        `tokens`, `labels` int64 and `loss_mask` float32, each [micro_batch, sequence_length], and `documents` int32 of
        the same shape where packing keeps them apart.

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
    return _load(datasets, sampler, config.workers)


def validation_batches(
    source: OpenSource, config: DataConfig, *, data_rank: int = 0, data_size: int = 1
) -> Iterator[Batch]:
    """Micro-batches of one rank over the first `validation_samples` of a source's validation order; the same number on
    every rank.

    All are [micro_batch, sequence_length]: the last are filled up with samples whose `loss_mask` is zero, so a
    micro-batch may hold no valid token at all, and losses are to be summed and divided by the sum of the masks.
    """
    wanted, micro = source.validation_samples, config.micro_batch
    starts = range(data_rank * micro, math.ceil(wanted / (micro * data_size)) * micro * data_size, micro * data_size)
    batches = [[i if i < wanted else None for i in range(start, start + micro)] for start in starts]
    return _load(_Validation(source.validation), batches, workers=0)


@dataclass(frozen=True)
class _Validation:
    """A source's validation rows; None is a row without a valid token, to fill up with."""

    samples: Samples

    def __getitem__(self, index: int | None) -> Row:
        row = self.samples.row(index or 0)
        return row if index is not None else row | {"loss_mask": np.zeros_like(row["loss_mask"])}


def sample_digest(tokens: torch.Tensor | npt.ArrayLike) -> bytes:
    """16 bytes that stand for one sample's tokens [sequence_length]; what ranks exchange to hash a global batch."""
    return hashlib.blake2b(np.ascontiguousarray(tokens, dtype="<i8").tobytes(), digest_size=16).digest()


def combine(digests: Iterable[bytes]) -> str:
    """Short hash of a global batch from its samples' digests, in the order of the global batch."""
    return hashlib.blake2b(b"".join(digests), digest_size=8).hexdigest()


def batch_hash(samples: Iterable[torch.Tensor | npt.ArrayLike]) -> str:
    """Short hash of a step's global batch: the tokens of every sample, in order. The same under any layout."""
    return combine(sample_digest(tokens) for tokens in samples)


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


def _collate(rows: list[Row]) -> Batch:
    import torch

    return {field: torch.from_numpy(np.stack([row[field] for row in rows])) for field in rows[0]}
