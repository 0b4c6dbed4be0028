"""From text to tokens on disk: reads a source once and writes a prepared corpus (`data.corpus`) that every run reuses.

A corpus is built in a hidden folder beside its final place and renamed when it is whole, so a half-prepared one is
never read; a lock file lets one process build while others wait for the result. The source is cut into parts
(`data.parts`) that processes share; parts that are whole when a preparation is killed are not made again. With a shard,
several commands on any machines share the parts, and whichever ends last puts them together (`data.merging`).

The folder's name holds a hash of what decides its content (files with sizes and times of change, tokenizer, text field,
split): the same source is found again by listing its files, a changed one is prepared anew beside the old.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from data.config import DataConfig, DataError
from data.corpus import FORMAT_VERSION, Corpus, is_prepared, open_corpus, write_manifest
from data.durable import flush
from data.merging import merge
from data.parts import Part, check_bad, cut_parts
from data.processes import build_parts
from data.progress import Progress, Say, saying
from data.refusals import why
from data.sources import Source, check_readable, find_source
from data.tokenizers import BYTE, copy_name, load_tokenizer, tokenizer_hash, tokenizer_path


@dataclass(frozen=True)
class Shard:
    """`number` of `count` commands that prepare one source together; counted from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads `2/8`. Raises DataError for anything else."""
        found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise DataError(f"shard={text}: wanted i/n with i from 1 to n, as in shard=2/8.")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def prepare(config: DataConfig, *, say: Say = print) -> Corpus:
    """The corpus of one source: opened if it is there, else prepared under `config.prepared`.

    Args:
        config: of one source (`DataConfig.of_source`); what concerns batches is not used.
        say: gets one line an event (what is reused, waited for, skipped, written).

    Raises:
        DataError: anything that is wrong with the source, the tokenizer or a prepared folder.
    """
    corpus = _prepare(config, say, None)
    assert corpus is not None, "one command alone prepares all"
    return corpus


def prepare_shard(config: DataConfig, shard: Shard, *, say: Say = print) -> Corpus | None:
    """This shard's parts of a source, and the corpus if they were the last; None while others are still at work."""
    return _prepare(config, say, shard)


def _prepare(config: DataConfig, say: Say, shard: Shard | None) -> Corpus | None:
    assert config.path is not None, "one source: see DataConfig.of_source"
    given = Path(config.path).expanduser().absolute()
    if is_prepared(given):
        return _open_given(given, config, say)
    source = find_source(config.path)
    folder = Path(config.prepared).expanduser().absolute() / _folder_name(source, config)
    if os.path.exists(folder):
        return _reuse(folder, config, say)
    work = _Work(source, config, folder, say)
    if shard is not None:
        return work.of_shard(shard)
    with work.locked(folder.name):
        return _reuse(folder, config, say) if folder.exists() else work.alone()


def _open_given(folder: Path, config: DataConfig, say: Say) -> Corpus:
    corpus = open_corpus(folder)
    if tokenizer_hash(config.tokenizer) != corpus.tokenizer_hash:
        own = BYTE if corpus.tokenizer == BYTE else folder / copy_name(corpus.tokenizer)
        raise DataError(
            f"data.path: {folder} was prepared with tokenizer {corpus.tokenizer} (hash {corpus.tokenizer_hash[:12]}), "
            f"but data.tokenizer is {config.tokenizer}, which makes other ids. Set data.tokenizer={own}, or give the "
            "source itself."
        )
    say(f"data: {corpus.describe()}; {folder}")
    return corpus


def _reuse(folder: Path, config: DataConfig, say: Say) -> Corpus:
    corpus = open_corpus(folder)
    check_bad(corpus.bad, config.max_bad_documents)
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


class _Work:
    """One source on its way to `folder`."""

    def __init__(self, source: Source, config: DataConfig, folder: Path, say: Say) -> None:
        self._source, self._config, self._folder, self._say = source, config, folder, say
        self._building = folder.with_name(f".{folder.name}.building")
        self._parts = cut_parts(source, self._building)

    def alone(self) -> Corpus:
        """All parts, then the corpus; the caller holds the lock. Parts that are whole stay if something goes wrong."""
        with self._refusals():
            try:
                self._build(self._parts)
            finally:
                if not any(part.is_whole() for part in self._parts):
                    shutil.rmtree(self._building, ignore_errors=True)
            try:
                return self._finish()
            except DataError:  # of the source as a whole: no part can mend it
                shutil.rmtree(self._building, ignore_errors=True)
                raise

    def of_shard(self, shard: Shard) -> Corpus | None:
        """This shard's parts, then the corpus where all others are there."""
        say, folder = self._say, self._folder
        try:
            with self.locked(f"{folder.name}.shard-{shard.number}-of-{shard.count}"), self._refusals():
                self._build(self._parts[shard.number - 1 :: shard.count])
        except DataError:
            if not folder.exists():
                raise  # else another command has made these parts too, and taken the folder away with them
        with self.locked(folder.name), self._refusals():
            if folder.exists():
                shutil.rmtree(self._building, ignore_errors=True)
                return _reuse(folder, self._config, say)
            missing = sum(not part.is_whole() for part in self._parts)
            if missing:
                say(
                    f"data: shard {shard} is done; {missing} of {len(self._parts)} parts are still to come, and the "
                    "shard that ends last puts them together"
                )
                return None
            return self._finish()

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Holds a lock file; the kernel lets go of it when the process ends, however it ends, and never before."""
        folder = self._folder.parent
        with self._open_lock(folder / f".{name}.lock") as stream:
            try:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._say(f"data: another process is preparing {name}; waiting for it")
                    with saying(self._say, self._waiting):
                        fcntl.flock(stream, fcntl.LOCK_EX)
            except OSError as error:
                raise DataError(
                    f"data.prepared: can't lock files in {folder}: {error.strerror}. Set data.prepared to a folder on "
                    "a file system that has locks."
                ) from error
            yield

    def _open_lock(self, lock: Path) -> IO[str]:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            try:
                return lock.open("w", encoding="utf-8")
            except PermissionError:  # another user's can be held all the same
                if os.path.exists(lock):
                    return lock.open(encoding="utf-8")
                raise
        except OSError as error:
            raise DataError(
                f"data.prepared: can't write in {lock.parent}: {why(error, lock)}. Set data.prepared to a folder that "
                "can be written."
            ) from error

    def _waiting(self, seconds: float) -> str:
        whole = sum(part.is_whole() for part in self._parts)
        return f"data: waited {seconds:.0f} s so far; {whole} of {len(self._parts)} parts are there"

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """What the file system refuses, in words."""
        try:
            yield
        except OSError as error:
            room = f"Free space there (about {4 * self._source.size / 1e6:.0f} MB for bytes as tokens, half of it for "
            way_out = f"{room}the time being) or set data.prepared to another folder."
            if isinstance(error, PermissionError):
                way_out = "Set data.prepared to a folder of your own, or let that user prepare it."
            raise DataError(
                f"data.prepared: can't write {self._building}: {why(error, self._building)}. {way_out}"
            ) from error

    def _build(self, parts: Sequence[Part]) -> None:
        """Makes those parts that are not there yet, in as many processes as there is work for."""
        source, config, say = self._source, self._config, self._say
        load_tokenizer(config.tokenizer)  # a mistake there is found before any process is started
        missing = [part for part in parts if not part.is_whole()]
        check_readable(file for part in missing for file in part.files)
        files = "1 file" if len(source.files) == 1 else f"{len(source.files):,} files"
        size = f"{files}, {source.size / 1e6:.1f} MB" if source.files else "from the hub"
        again = f"; {len(parts) - len(missing)} of {len(parts)} parts are there already" if missing != parts else ""
        say(f"data: preparing {source.name} ({size}) in {self._folder}{again}")
        self._building.mkdir(parents=True, exist_ok=True)
        progress = Progress(sum(part.size for part in missing))
        with saying(say, lambda seconds: progress.line()):
            for info in build_parts(source, missing, config, progress):
                for one in info.bad:
                    say(f"data: skipped {one.origin}: {one.reason}")

    def _finish(self) -> Corpus:
        """The corpus from its parts, in its place."""
        whole = self._building / "corpus"
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir()

        def line(seconds: float) -> str:
            size = sum(path.stat().st_size for path in whole.glob("*.bin"))
            return f"data: putting the parts together, {size / 1e6:,.0f} MB of ids so far"

        with saying(self._say, line):
            corpus = self._put_together(whole)
        whole.rename(self._folder)
        flush(self._folder.parent)
        shutil.rmtree(self._building, ignore_errors=True)
        _report(corpus, self._say)
        return corpus

    def _put_together(self, whole: Path) -> Corpus:
        """Everything that a corpus has, in `whole` and on the disk."""
        config = self._config
        tokenizer = load_tokenizer(config.tokenizer)
        corpus = merge(self._source, self._parts, config, tokenizer, self._folder, whole)
        for candidate in whole.glob(".candidate-*"):
            candidate.unlink()
        write_manifest(corpus, whole)
        if tokenizer.name != BYTE:
            shutil.copyfile(tokenizer_path(config.tokenizer), whole / copy_name(tokenizer.name))
        for path in (*whole.iterdir(), whole):
            flush(path)
        return corpus


def _report(corpus: Corpus, say: Say) -> None:
    """What was written, and that no token was lost: both sides are counted, and the files checked."""
    splits = (corpus.train, corpus.validation)
    tokens, documents = (sum(getattr(split, what) for split in splits) for what in ("tokens", "documents"))
    say(f"data: {tokens:,} tokens written = {tokens - documents:,} of text + {documents:,} ends of documents")
    say(f"data: prepared {corpus.describe()}")
