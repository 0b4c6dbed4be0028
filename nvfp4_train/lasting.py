"""Output that outlives who reads it: `| head`, a closed terminal, the full disk of a log. No torch here."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, cast


def lasting(stream: TextIO | None, lost: Callable[[OSError], None] = lambda error: None) -> TextIO:
    """`stream`, but what can't be written to it is dropped: what was asked for goes on, and ends with its own code.

    Args:
        stream: None is where Python started without one (`>&-`).
        lost: called once, when the first text is dropped.
    """
    return cast(TextIO, _Lasting(stream or _nowhere(), lost))


def tell(text: str) -> None:
    """One line on stderr, where it can be written: it must not hide with which code a process ends."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def unread() -> bool:
    """Whether standard output is a pipe that nobody reads any more; if so, what it still holds goes nowhere."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in watched.poll(0)):
        return False
    with _nowhere() as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return True


class _Lasting:
    def __init__(self, stream: TextIO, lost: Callable[[OSError], None]) -> None:
        self._stream, self._lost = stream, lost

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._leave(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._leave(error)

    def _leave(self, error: OSError) -> None:
        """What the stream still holds, and what others write to it, goes nowhere too."""
        nowhere = _nowhere()
        with suppress(io.UnsupportedOperation):
            os.dup2(nowhere.fileno(), self._stream.fileno())
        self._stream = nowhere
        self._lost(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")
