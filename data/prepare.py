"""From text to tokens on disk: reads a source once and writes a prepared corpus (`data.corpus`) that every run reuses.

A corpus is built in a hidden folder beside its final place and renamed when it is whole, so a half-prepared one is
never read; a lock file lets one process build while others wait for the result. The folder's name holds a hash of what
decides its content (files with sizes and times of change, tokenizer, text field, split): the same source is found
again by listing its files, a changed one is prepared anew beside the old.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from data.config import DataConfig, DataError
from data.corpus import (
    FORMAT_VERSION,
    TRAIN,
    VALIDATION,
    Corpus,
    FileInfo,
    Skipped,
    SourceInfo,
    is_prepared,
    open_corpus,
    write_manifest,
)
from data.durable import flush
from data.readers import BadDocument, read_documents
from data.sources import Source, find_source
from data.splitting import Splitter
from data.tokenizers import BYTE, Tokenizer, load_tokenizer, tokenizer_hash, tokenizer_path
from data.writing import SplitWriter, id_dtype

BATCH_CHARACTERS = 1 << 21
BATCH_DOCUMENTS = 1024

Say = Callable[[str], None]


def prepare(config: DataConfig, *, say: Say = print) -> Corpus:
    """The corpus that `config` describes: opened if it is there, else prepared under `config.prepared`.

    Args:
        config: `path`, `prepared`, `text_field`, `tokenizer`, `max_bad_documents` and `validation_share` are used.
        say: gets one line an event (what is reused, waited for, skipped, written).

    Raises:
        DataError: anything that is wrong with the source, the tokenizer or a prepared folder.
    """
    given = Path(config.path).expanduser().absolute()
    if is_prepared(given):
        return _open_given(given, config, say)
    source = find_source(config.path)
    prepared = Path(config.prepared).expanduser().absolute()
    folder = prepared / _folder_name(source, config)
    if folder.exists():
        return _reuse(folder, config, say)
    with _only_builder(folder, say):
        if folder.exists():
            return _reuse(folder, config, say)
        return _build(source, config, folder, say)


def _open_given(folder: Path, config: DataConfig, say: Say) -> Corpus:
    corpus = open_corpus(folder)
    if tokenizer_hash(config.tokenizer) != corpus.tokenizer_hash:
        own = BYTE if corpus.tokenizer == BYTE else folder / "tokenizer.json"
        raise DataError(
            f"data.path: {folder} was prepared with tokenizer {corpus.tokenizer} (hash {corpus.tokenizer_hash[:12]}), "
            f"but data.tokenizer is {config.tokenizer}, which makes other ids. Set data.tokenizer={own}, or give the "
            "source itself."
        )
    say(f"data: {corpus.describe()}; {folder}")
    return corpus


def _reuse(folder: Path, config: DataConfig, say: Say) -> Corpus:
    corpus = open_corpus(folder)
    _check_bad(corpus.bad, config.max_bad_documents)
    say(f"data: reusing {corpus.describe()}; {folder}")
    return corpus


def _folder_name(source: Source, config: DataConfig) -> str:
    deciding = [
        source.identity,
        tokenizer_hash(config.tokenizer),
        config.text_field,
        config.validation_share,
        FORMAT_VERSION,
    ]
    short = hashlib.sha256(json.dumps(deciding).encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', source.name).strip('.')[:64] or 'corpus'}-{short}"


@contextmanager
def _only_builder(folder: Path, say: Say) -> Iterator[None]:
    """Holds the lock of `folder`; the kernel lets go of it when the process ends, however it ends."""
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        stream = lock.open("w")
    except OSError as error:
        raise DataError(
            f"data.prepared: can't write in {folder.parent}: {error.strerror}. Set data.prepared to a folder that can "
            "be written."
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"data: another process is preparing {folder.name}; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _build(source: Source, config: DataConfig, folder: Path, say: Say) -> Corpus:
    """Builds beside `folder` and renames; the caller holds its lock, so what an earlier builder left there is dead."""
    tokenizer = load_tokenizer(config.tokenizer)
    building = folder.with_name(f".{folder.name}.building")
    files = "1 file" if len(source.files) == 1 else f"{len(source.files):,} files"
    say(f"data: preparing {source.name} ({files}, {source.size / 1e6:.1f} MB) in {folder}")
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        corpus = _write(source, config, tokenizer, folder, building, say)
        write_manifest(corpus, building)
        if tokenizer.name != BYTE:
            shutil.copyfile(tokenizer_path(config.tokenizer), building / "tokenizer.json")
        for path in (*building.iterdir(), building):
            flush(path)
        building.rename(folder)
        flush(folder.parent)
    except OSError as error:
        raise DataError(
            f"data.prepared: can't write {building}: {error.strerror or error}. Free space there (about "
            f"{2 * source.size / 1e6:.0f} MB for bytes as tokens) or set data.prepared to another folder."
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    _report(corpus, say)
    return corpus


def _write(source: Source, config: DataConfig, tokenizer: Tokenizer, folder: Path, building: Path, say: Say) -> Corpus:
    """Reads, tokenizes, splits and writes every document; gives the corpus as it will stand in `folder`."""
    files = tuple(FileInfo(file.name, file.size, file.sha256()) for file in source.files)
    documents = _Documents(source, config, say)
    dtype = id_dtype(tokenizer.vocab_size)
    writers = {s: SplitWriter(building / s, dtype, tokenizer.vocab_size, tokenizer.eod) for s in (TRAIN, VALIDATION)}
    splitter = Splitter(config.validation_share)
    for batch in _batched(documents):
        for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            if ids.size == 0:  # the tokenizer's normalizer may leave nothing of a text
                documents.empty += 1
                continue
            for placed in splitter.add(text, ids):
                writers[placed.split].add(placed.ids, placed.num_bytes)
    for placed in splitter.rest():
        writers[placed.split].add(placed.ids, placed.num_bytes)
    documents.check_enough(writers[TRAIN].documents, writers[VALIDATION].documents)
    source.check_unchanged()
    train, validation = writers[TRAIN].finish(), writers[VALIDATION].finish()
    vocabulary = [tokenizer.hash, tokenizer.vocab_size, tokenizer.eod, dtype.__name__]
    return Corpus(
        path=folder,
        name=folder.name,
        hash=_hash_json([train.sha256, validation.sha256, *vocabulary]),
        source=SourceInfo(
            kind=source.kind,
            path=str(source.root),
            text_field=config.text_field,
            hash=_hash_json([[file.name, file.sha256] for file in files]),
            files=files,
            ignored_files=source.ignored,
        ),
        tokenizer=tokenizer.name,
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        dtype=dtype.__name__,
        largest_id=max(writer.largest_id() for writer in writers.values()),
        unigram_entropy=writers[TRAIN].unigram_entropy(),
        validation_share=config.validation_share,
        train=train,
        validation=validation,
        empty=documents.empty,
        bad=tuple(documents.bad),
    )


@dataclass
class _Documents:
    """The documents of a source that can be used; counts the others and stops at one bad document too many."""

    source: Source
    config: DataConfig
    say: Say
    empty: int = 0
    bad: list[Skipped] = field(default_factory=list)

    def __iter__(self) -> Iterator[str]:
        for document in read_documents(self.source, self.config.text_field):
            if isinstance(document, BadDocument):
                self._skip(document)
            elif not document.text or document.text.isspace():
                self.empty += 1
            else:
                yield document.text

    def _skip(self, document: BadDocument) -> None:
        self.bad.append(Skipped(document.origin, document.reason))
        _check_bad(self.bad, self.config.max_bad_documents)
        self.say(f"data: skipped {document.origin}: {document.reason}")

    def check_enough(self, train: int, validation: int) -> None:
        """Raises DataError unless both splits have a document."""
        if train + validation == 0:
            raise DataError(
                f"data.path: {self.source.root} has no text: {self.empty} empty or white-space documents, "
                f"{len(self.bad)} unreadable ones. There is nothing to train on."
            )
        if train == 0 or validation == 0:
            raise DataError(
                f"data.path: {self.source.root} has {train + validation} usable document(s), of which {train} fall to "
                f"training and {validation} to validation; each needs one. Give more documents, or change "
                f"data.validation_share (now {self.config.validation_share})."
            )


def _check_bad(bad: list[Skipped] | tuple[Skipped, ...], limit: int) -> None:
    if len(bad) > limit:
        one = bad[limit]
        raise DataError(
            f"{one.origin}: {one.reason}. That is unreadable document {limit + 1}, and data.max_bad_documents is "
            f"{limit}: mend it, or set data.max_bad_documents={limit + 1} or more to skip such documents."
        )


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    """Batches of bounded size, for the tokenizer."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _report(corpus: Corpus, say: Say) -> None:
    """What was written, and that no token was lost: the writers counted both sides and checked the files."""
    splits = (corpus.train, corpus.validation)
    tokens, documents = (sum(getattr(split, what) for split in splits) for what in ("tokens", "documents"))
    say(f"data: {tokens:,} tokens written = {tokens - documents:,} of text + {documents:,} ends of documents")
    say(f"data: prepared {corpus.describe()}")


def _hash_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
