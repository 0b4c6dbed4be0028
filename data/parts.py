"""A source in parts: each is read, tokenized and written by itself, so that processes and machines can share the work
and a preparation that was killed goes on where it stood.

A part is one file, or small ones that stand side by side up to PART_BYTES together. Its folder appears whole:

    part-00003/
        part.json                      `PartInfo`
        train.bin, train.npy           ids, and the length of each document
        validation.bin, validation.npy
        counts.npy                     [2, vocabulary] how often each id is in either split
        candidate.npy                  ids of the document kept back (`data.splitting`), if there is one

What is in a part depends on the source and the settings alone, never on who made it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.config import DataConfig, DataError
from data.corpus import TRAIN, VALIDATION, FileInfo, Skipped
from data.durable import flush
from data.encoding import Content, Encode, batched
from data.readers import BadDocument, Document, read_documents
from data.sources import Source, SourceFile, check_unchanged
from data.splitting import Splitter
from data.tokenizers import Ids, Tokenizer
from data.writing import SplitWriter

PART_BYTES = 1 << 24

Advance = Callable[[int], None]


@dataclass(frozen=True)
class PartInfo:
    """What a part holds. `documents`, `tokens`, `bytes`: of training and validation, without the document kept back.

    Attributes:
        files: what was read.
        candidate_position, candidate_bytes: of the document kept back; None and 0 where there is none.
        empty, bad: documents skipped.
    """

    files: tuple[FileInfo, ...]
    documents: tuple[int, int]
    tokens: tuple[int, int]
    bytes: tuple[int, int]
    candidate_position: float | None
    candidate_bytes: int
    empty: int
    bad: tuple[Skipped, ...]


@dataclass(frozen=True)
class Part:
    """Some files of a source, in order, and where what is made of them belongs."""

    folder: Path
    files: tuple[SourceFile, ...]

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.size for file in self.files)

    def is_whole(self) -> bool:
        """Whether it was built before."""
        return (self.folder / "part.json").is_file()

    def info(self) -> PartInfo:
        """What was built."""
        found: dict[str, Any] = json.loads((self.folder / "part.json").read_text(encoding="utf-8"))
        files = tuple(FileInfo(**file) for file in found.pop("files"))
        bad = tuple(Skipped(**one) for one in found.pop("bad"))
        found |= {name: tuple(found[name]) for name in ("documents", "tokens", "bytes")}
        return PartInfo(files=files, bad=bad, **found)

    def counts(self) -> npt.NDArray[np.int64]:
        """[2, vocabulary]: of training and validation."""
        counts: npt.NDArray[np.int64] = np.load(self.folder / "counts.npy")
        return counts

    def candidate(self) -> Ids:
        """Ids of the document kept back."""
        ids: Ids = np.load(self.folder / "candidate.npy")
        return ids


def cut_parts(source: Source, root: Path) -> list[Part]:
    """The parts of a source, in order: the same for the same list of files. A data set of the hub is one part."""
    groups: list[list[SourceFile]] = [[]]
    size = 0
    for file in source.files:
        if groups[-1] and size + file.size > PART_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [Part(root / f"part-{number:05d}", tuple(files)) for number, files in enumerate(groups)]


def build_part(
    source: Source, part: Part, config: DataConfig, tokenizer: Tokenizer, encode: Encode, advance: Advance
) -> PartInfo:
    """Makes a part's folder, or finds that somebody made it meanwhile.

    Args:
        encode: turns batches into ids with `tokenizer`, here or in other processes, in order.
        advance: is told how many bytes of text are done, now and then.

    Raises:
        DataError: a file, or one bad document too many.
    """
    building = part.folder.with_name(f".{part.folder.name}.{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        info = _build(_Documents(source, part, config, tokenizer), encode, building, advance)
        text = json.dumps(asdict(info), indent=1)
        (building / "part.json").write_text(text + "\n", encoding="utf-8")
        for path in (*building.iterdir(), building):
            flush(path)
        try:
            building.rename(part.folder)
        except OSError:
            if not part.is_whole():  # else somebody made it meanwhile, and it is the same
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return part.info()


def _build(documents: _Documents, encode: Encode, building: Path, advance: Advance) -> PartInfo:
    files = tuple(FileInfo(file.name, file.size, file.sha256()) for file in documents.part.files)
    tokenizer = documents.tokenizer
    writers = {s: SplitWriter(building / s, tokenizer.vocab_size, tokenizer.eod) for s in (TRAIN, VALIDATION)}
    splitter = Splitter(documents.config.validation_share)
    for batch in encode(batched(documents)):
        for document in batch.documents():
            if document.ids.size == 0:  # the tokenizer's normalizer may leave nothing of a text
                documents.empty += 1
                continue
            for placed in splitter.add(document):
                writers[placed.split].add(placed.ids, placed.num_bytes)
        advance(int(batch.num_bytes.sum()))
    check_unchanged(documents.part.files)
    for writer in writers.values():
        writer.finish()
    np.save(building / "counts.npy", np.stack([writer.counts for writer in writers.values()]))
    candidate = splitter.rest()
    if candidate is not None:
        np.save(building / "candidate.npy", candidate.ids)
    train, validation = writers[TRAIN], writers[VALIDATION]
    return PartInfo(
        files=files,
        documents=(train.documents, validation.documents),
        tokens=(train.tokens, validation.tokens),
        bytes=(train.bytes, validation.bytes),
        candidate_position=None if candidate is None else candidate.position,
        candidate_bytes=0 if candidate is None else candidate.num_bytes,
        empty=documents.empty,
        bad=tuple(documents.bad),
    )


@dataclass
class _Documents:
    """The documents of a part that can be used; counts the others and stops at one bad document too many."""

    source: Source
    part: Part
    config: DataConfig
    tokenizer: Tokenizer
    empty: int = 0
    bad: list[Skipped] = field(default_factory=list)

    def __iter__(self) -> Iterator[Content]:
        config = self.config
        for document in read_documents(self.source, config.text_field, self.part.files, config.stream):
            if isinstance(document, BadDocument):
                self._skip(document.origin, document.reason)
            elif isinstance(document, Document):
                if not document.text or document.text.isspace():
                    self.empty += 1
                else:
                    yield document.text
            else:
                yield from self._stored(document.ids, document.origin)

    def _stored(self, ids: Ids, origin: str) -> Iterator[Content]:
        """A document of ids; its end, where it has one, is put there by the writer."""
        tokenizer = self.tokenizer
        outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
        if outside.size:
            raise DataError(
                f"{origin}: holds id {int(outside[0])}, and the ids of tokenizer {tokenizer.name} run from 0 to "
                f"{tokenizer.vocab_size - 1}. Set data.tokenizer to the one that these binaries were made with."
            )
        if ids.size and ids[-1] == tokenizer.eod:
            ids = ids[:-1]
        if ids.size == 0:
            self.empty += 1
        elif (ids == tokenizer.eod).any():
            self._skip(origin, f"holds the id that ends a document, {tokenizer.eod}, before its end")
        else:
            yield ids

    def _skip(self, origin: str, reason: str) -> None:
        self.bad.append(Skipped(origin, reason))
        check_bad(self.bad, self.config.max_bad_documents)


def check_bad(bad: list[Skipped] | tuple[Skipped, ...], limit: int) -> None:
    """Raises DataError where there are more bad documents than `limit`, with the first that is too many."""
    if len(bad) > limit:
        one = bad[limit]
        raise DataError(
            f"{one.origin}: {one.reason}. That is unreadable document {limit + 1}, and data.max_bad_documents is "
            f"{limit}: mend it, or set data.max_bad_documents={limit + 1} or more to skip such documents."
        )
