"""Files written whole or not at all, and what a disk's refusals mean to a user. No torch here."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nvfp4_train.config import ConfigError

FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def temporary_of(path: Path) -> Path:
    """The name that `path` is written under first. One name a file: what a killed process left is overwritten."""
    return path.with_name(f".{path.name}.tmp")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all: another name, flushed to the disk, then renamed.

    Two writers of one file must exclude each other; in a run folder its lock does that.

    Raises:
        OSError: with the file's name, also where the system gives none.
    """
    temporary = temporary_of(path)
    try:
        with named(path), open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Gives errors of writing and flushing the name of their file, which the system leaves out."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


@contextmanager
def refusals_said(folder: Path) -> Iterator[None]:
    """Makes a ConfigError with the way out of a full disk, or of a place that may not be written, below `folder`."""
    try:
        yield
    except OSError as error:
        where = error.filename
        if isinstance(where, str | os.PathLike) and Path(where).is_relative_to(folder):
            said = refusal(error, folder)
            if said is not None:
                raise said from error
        raise


def refusal(error: OSError, folder: Path) -> ConfigError | None:
    """The message for a run folder that can't be written, None for an error of another kind."""
    where = error.filename or folder
    if error.errno in FULL:
        return ConfigError(
            f"{where}: {error.strerror}. Free some space; the same command goes on from the last checkpoint."
        )
    if error.errno in CLOSED:
        return ConfigError(f"{where}: {error.strerror}. Choose another run_dir or make it writable.")
    return None
