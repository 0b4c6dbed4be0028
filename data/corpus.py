"""A prepared corpus: a folder with Megatron's indexed binaries of two splits and the manifest that says what they are.

    manifest.json                      what this module reads and writes
    train.bin, train.idx               token ids of the documents that are trained on
    validation.bin, validation.idx     token ids of the documents held out
    tokenizer.json                     copy of the tokenizer's file (byte has none)

Neither torch nor Megatron is imported here: what only looks at a corpus stays fast.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.config import DataError
from data.refusals import why

MANIFEST = "manifest.json"
FORMAT = "indexed corpus"
FORMAT_VERSION = 1
TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class SplitInfo:
    """One split: counts, the UTF-8 bytes of its text, sizes of its files in bytes, SHA-256 of its token ids as stored.

    `tokens` counts the end-of-document token that follows each document.
    """

    documents: int
    tokens: int
    bytes: int
    bin_size: int
    idx_size: int
    sha256: str


@dataclass(frozen=True)
class FileInfo:
    """A file of the source as it was read; `name` is relative to the source's path."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class SourceInfo:
    """Where the text came from; `hash` is of the files' names and content."""

    kind: str
    path: str
    text_field: str
    hash: str
    files: tuple[FileInfo, ...]
    ignored_files: int


@dataclass(frozen=True)
class Skipped:
    """A document that could not be read: where it is and why."""

    origin: str
    reason: str


@dataclass(frozen=True)
class Corpus:
    """What the manifest says.

    Attributes:
        path: the folder.
        hash: of the token ids of both splits and the vocabulary: equal for equal corpora, wherever they are.
        tokenizer, tokenizer_hash: its name when prepared (`byte` or a path), and the hash of what decides its ids.
        vocab_size: one more than the largest id that the tokenizer can make; eod: id of the end-of-document token.
        dtype: of the ids on disk: uint16, or int32 where the vocabulary needs it.
        largest_id: the largest id in the data, eod included.
        unigram_entropy: nats a token of the training split under its own token frequencies: what a model that knows
            nothing but these would score.
        empty: documents skipped because they held white space or nothing.
        bad: documents skipped because they could not be read.
    """

    path: Path
    name: str
    hash: str
    source: SourceInfo
    tokenizer: str
    tokenizer_hash: str
    vocab_size: int
    eod: int
    dtype: str
    largest_id: int
    unigram_entropy: float
    validation_share: float
    train: SplitInfo
    validation: SplitInfo
    empty: int
    bad: tuple[Skipped, ...]

    def prefix(self, split: str) -> str:
        """Path of a split's files without their suffix, as Megatron wants it."""
        return str(self.path / split)

    def describe(self) -> str:
        """One line for people."""
        skipped = f", skipped {self.empty} empty and {len(self.bad)} unreadable" if self.empty or self.bad else ""
        return (
            f"{self.name}: {self.train.documents:,} documents and {self.train.tokens:,} tokens for training, "
            f"{self.validation.documents:,} and {self.validation.tokens:,} for validation (tokenizer {self.tokenizer}, "
            f"vocabulary {self.vocab_size}){skipped}"
        )


def is_prepared(path: Path) -> bool:
    """Whether a folder is a prepared corpus (whole or not), not a source that happens to hold a manifest of its own."""
    found = [os.path.isfile(path / name) for name in (MANIFEST, f"{TRAIN}.bin", f"{TRAIN}.idx")]  # may be out of reach
    return found[0] and any(found[1:])


def open_corpus(path: str | Path) -> Corpus:
    """Reads the manifest of a prepared corpus and checks that its files have the sizes it states.

    Raises:
        DataError: no or an unreadable manifest, one of another format, or a file that is missing, cut short or too
        long.
    """
    path = Path(path).expanduser().absolute()
    corpus = _from_manifest(path, _read_manifest(path))
    for split, info in ((TRAIN, corpus.train), (VALIDATION, corpus.validation)):
        for end, wanted in (("bin", info.bin_size), ("idx", info.idx_size)):
            _check_size(path / f"{split}.{end}", wanted)
    return corpus


def write_manifest(corpus: Corpus, folder: Path) -> None:
    """Writes `corpus` as the manifest of `folder`, which is not yet at `corpus.path`."""
    manifest: dict[str, Any] = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(corpus)}
    del manifest["path"]
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def check_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    """Raises DataError unless every id that can occur is below the model's `vocab_size`; nothing is ever clamped."""
    ids = {
        "the largest id in the data": corpus.largest_id,
        "the end-of-document token": corpus.eod,
        "the tokenizer's largest id, added tokens included,": corpus.vocab_size - 1,
    }
    over = [f"{what} is {id_}" for what, id_ in ids.items() if id_ >= vocab_size]
    if over:
        raise DataError(
            f"model.vocab_size is {vocab_size}, so ids run from 0 to {vocab_size - 1}, but in {corpus.path} "
            f"{', '.join(over)}. Set model.vocab_size={max(ids.values()) + 1} or more, or prepare with the tokenizer "
            "that belongs to the model."
        )


def bits_per_byte(nats_per_token: float, corpus: Corpus) -> float:
    """Validation loss (nats a token) as bits a byte of text, which compares across tokenizers."""
    return nats_per_token * corpus.validation.tokens / corpus.validation.bytes / math.log(2)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(file, error) from error
    except ValueError as error:
        raise DataError(f"{file} is damaged: {error}. Delete the folder and prepare the corpus again.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{file} is not the manifest of a prepared corpus. Give the folder that `prepare` wrote.")
    if manifest.get("version") != FORMAT_VERSION:
        raise DataError(
            f"{file} is of format version {manifest.get('version')}; this code reads version {FORMAT_VERSION}. "
            "Prepare it again."
        )
    return manifest


def _from_manifest(path: Path, manifest: dict[str, Any]) -> Corpus:
    fields = {key: value for key, value in manifest.items() if key not in ("format", "version")}
    try:
        source = fields.pop("source")
        files = tuple(FileInfo(**file) for file in source.pop("files"))
        return Corpus(
            path=path,
            source=SourceInfo(files=files, **source),
            train=SplitInfo(**fields.pop("train")),
            validation=SplitInfo(**fields.pop("validation")),
            bad=tuple(Skipped(**one) for one in fields.pop("bad")),
            **fields,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path / MANIFEST} is damaged: {error}. Delete the folder and prepare the corpus again."
        ) from error


def _check_size(file: Path, wanted: int) -> None:
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise _unreadable(file, error) from error
    if size != wanted:
        raise DataError(
            f"{file} is damaged: it has {size} bytes, the manifest says {wanted}. Delete {file.parent} and prepare "
            "the corpus again."
        )


def _unreadable(file: Path, error: OSError) -> DataError:
    way_out = f"A prepared corpus has this file: delete {file.parent} and prepare the corpus again."
    if isinstance(error, PermissionError):
        way_out = "Have it made readable for this user, or prepare the text in a folder of your own (data.prepared)."
    return DataError(f"can't read {file}: {why(error, file)}. {way_out}")
