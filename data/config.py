"""What the trainer reads, as frozen dataclasses. No torch here: commands read it before any heavy import."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

BUILTIN = "builtin"
PACKAGES = "packages"
CONCATENATE, DOCUMENTS, BEST_FIT = PACKINGS = ("concatenate", "documents", "best_fit")


class DataError(ValueError):
    """A user's mistake about data: says what was wrong (file and line), why, and what to write instead."""


@dataclass(frozen=True)
class SourceConfig:
    """One source of a blend.

    Attributes:
        name: in metrics and messages.
        path: as `data.path`.
        weight: its share of the samples, over the sum of all weights, until the first of `data.phases`; 0 is for
            validation only.
        text_field: as `data.text_field`, which is taken where this is null.
        max_epochs: a run that would read the source more often than this is refused; null: as often as it takes.
    """

    name: str
    path: str
    weight: float = 1.0
    text_field: str | None = None
    max_epochs: float | None = None


@dataclass(frozen=True)
class PhaseConfig:
    """A change of the blend.

    Attributes:
        start: a share of the run below 1, a number of steps, or a text such as `7T tokens`.
        weights: one for each source, in their order.
    """

    start: float | int | str
    weights: tuple[float, ...]


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes batches.

    Attributes:
        path: `builtin` (the source text of Python's standard library), `packages` (that of the Python packages which
            are installed), a text file or folder, a .jsonl or .parquet file or folder (JSON lines also as .gz or .zst),
            `hub:NAME` (a data set of the Hugging Face hub), the .idx file of Megatron's indexed binaries, or a folder
            that `prepare` wrote. A source is prepared once, under `prepared`. null where `sources` are given.
        prepared: folder for prepared corpora; each gets a sub-folder named after the source and a hash of it, the
            tokenizer and the split.
        sources: several sources with weights, instead of `path`.
        phases: changes of the weights during the run, in order.
        text_field: the field (JSONL) or column (Parquet) that holds the text; nothing else is read.
        tokenizer: `byte`, the path of a `tokenizers` JSON file or of a SentencePiece .model, or `hub:NAME`.
        max_bad_documents: how many unreadable documents of a source are skipped (each is named) before its preparation
            stops.
        validation_share: share of the documents held out for validation, by a hash of their text: the same for every
            run; at least one.
        packing: `concatenate` (documents joined end to end, one seen from the next), `documents` (the same rows, but
            documents kept apart in the model) or `best_fit` (whole documents fitted into rows, kept apart).
        sequence_length: tokens a sample.
        global_batch: sequences an optimizer step, over all ranks and micro-batches.
        micro_batch: sequences a forward pass.
        workers: loader processes; 0 reads in the training process.
        processes: that prepare in parallel; 0 is one a core, as far as there is enough to do.
        stream: read `hub:` data sets from the network as they are prepared; false downloads them first.
    """

    path: str | None
    prepared: str
    sequence_length: int
    global_batch: int
    micro_batch: int
    sources: tuple[SourceConfig, ...] = ()
    phases: tuple[PhaseConfig, ...] = ()
    text_field: str = "text"
    tokenizer: str = "byte"
    max_bad_documents: int = 0
    validation_share: float = 0.02
    packing: str = CONCATENATE
    workers: int = 0
    processes: int = 0
    stream: bool = True

    def blended(self) -> tuple[SourceConfig, ...]:
        """The sources of a run: those given, or the one that `path` names.

        Raises:
            DataError: path and sources together, or neither; a name that is taken twice or can't be part of a metric's;
                weights of sources or phases that make no blend.
        """
        if (self.path is None) == (not self.sources):
            none = "neither data.path nor data.sources is"
            given = none if self.path is None else f"data.path={self.path} and data.sources are both"
            raise DataError(
                f"data: {given} given. Write data.path for one source, or data.sources with data.path=null for several."
            )
        sources = self.sources if self.path is None else (SourceConfig("text", self.path),)
        names = [source.name for source in sources]
        for name in names:
            if not re.fullmatch(r"[\w.-]+", name):
                raise DataError(f"data.sources: {name!r} is part of metrics' names: use letters, digits and . _ -")
            if names.count(name) > 1:
                raise DataError(f"data.sources: {name} is the name of several. Give each a name of its own.")
        check_weights([source.weight for source in sources], names, "data.sources")
        for phase in self.phases:
            check_weights(phase.weights, names, "data.phases")
        return sources

    def of_source(self, source: SourceConfig) -> DataConfig:
        """The settings by which one source is prepared."""
        text_field = source.text_field or self.text_field
        return replace(self, path=source.path, text_field=text_field, sources=(), phases=())


@dataclass(frozen=True)
class TokenizerTraining:
    """A tokenizer made by `prepare`: byte-level BPE, from the text of `data.path` that is not held out.

    Attributes:
        train: the file to write; null trains none. Where it is `data.tokenizer` too, one that is there is used.
        vocab_size: ids in all: special tokens, the 256 bytes, and merges.
        special_tokens: the first ids; the first of them ends a document.
        megabytes: text to learn from, from the source's beginning.
    """

    train: str | None = None
    vocab_size: int = 32768
    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    megabytes: int = 1000


def check_weights(weights: Sequence[float], names: Sequence[str], key: str) -> None:
    """Raises DataError for a number of weights that is not that of the sources, a bad weight, or nothing but zeros."""
    if len(weights) != len(names):
        raise DataError(f"{key}: {len(weights)} weights for {len(names)} sources ({', '.join(names)}). Give each one.")
    for name, weight in zip(names, weights, strict=True):
        if not (math.isfinite(weight) and weight >= 0):
            raise DataError(f"{key}: {name} has weight {weight}. Write a number from 0 on; 0 is for validation only.")
    if not any(weights):
        raise DataError(f"{key}: every weight is 0, so there is nothing to train on. Give a source a weight above 0.")
