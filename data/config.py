"""What the trainer reads, as a frozen dataclass. No torch here: commands read it before any heavy import."""

from __future__ import annotations

from dataclasses import dataclass


class DataError(ValueError):
    """A user's mistake about data: says what was wrong (file and line), why, and what to write instead."""


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes batches.

    Attributes:
        path: `builtin` (the source text of Python's standard library), a text file or folder, a .jsonl or .parquet
            file or folder, or a folder that `prepare` wrote. A source is prepared once, under `prepared`.
        prepared: folder for prepared corpora; each gets a sub-folder named after the source and a hash of it, the
            tokenizer and the split.
        text_field: the field (JSONL) or column (Parquet) that holds the text; nothing else is read.
        tokenizer: `byte`, or the path of a `tokenizers` JSON file.
        max_bad_documents: how many unreadable documents are skipped (each is named) before preparation stops.
        validation_share: share of the documents held out for validation, by a hash of their text: the same for every
            run; at least one.
        sequence_length: tokens a sample.
        global_batch: sequences an optimizer step, over all ranks and micro-batches.
        micro_batch: sequences a forward pass.
        workers: loader processes; 0 reads in the training process.
    """

    path: str
    prepared: str
    sequence_length: int
    global_batch: int
    micro_batch: int
    text_field: str = "text"
    tokenizer: str = "byte"
    max_bad_documents: int = 0
    validation_share: float = 0.02
    workers: int = 0
