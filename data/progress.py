"""Nobody waits without a word: how far a preparation is, how fast it goes, when it will be done, what is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 10.0

Say = Callable[[str], None]


@contextmanager
def saying(say: Say, line: Callable[[float], str]) -> Iterator[None]:
    """Says `line(seconds so far)` from a thread, every SECONDS_BETWEEN_LINES, while what is in here lasts."""
    start, done = time.monotonic(), threading.Event()

    def speak() -> None:
        while not done.wait(SECONDS_BETWEEN_LINES):
            say(line(time.monotonic() - start))

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Progress:
    """Counts bytes of text against the bytes of the files that they come from; a data set of the hub has no size.

    Speed counts from the first text on: before it, files are hashed and checked, and processes start.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock, self._lock = total, clock, threading.Lock()
        self._done = self._first = self._shown = 0
        self._start = self._last = clock()

    def add(self, count: int) -> None:
        """So many bytes of text more are done; from any thread."""
        with self._lock:
            self._last = self._clock()
            if self._done == 0:
                self._first, self._start = count, self._last
            self._done += count

    def line(self) -> str:
        """Where the work stands now."""
        done, now = self._done, self._clock()
        text = f"data: {done / 1e6:,.0f} MB done"
        if self._total:
            text = f"data: {done / self._total:.0%} of {self._total / 1e6:,.0f} MB"
        moved, self._shown = done > self._shown, done
        if not moved:
            what = "no more text" if done else "no text yet: files are hashed and checked first"
            return f"{text}; {what} ({_time(now - self._last)})"
        if done == self._first:
            return text
        rate = (done - self._first) / max(now - self._start, 1e-9)
        left = f", {_time(max(0, self._total - done) / rate)} left" if self._total else ""
        return f"{text}, {rate / 1e6:.1f} MB/s{left}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
