"""How far a preparation is, how fast it goes and when it will be done: a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts bytes of text against the bytes of the files that they come from; a data set of the hub has no size."""

    def __init__(self, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._say, self._clock = total, say, clock
        self._start = self._last = clock()

    def show(self, done: int) -> None:
        """Says where the work stands, unless it was said a moment ago."""
        now = self._clock()
        if now - self._last < SECONDS_BETWEEN_LINES or done == 0:
            return
        self._last = now
        rate = done / (now - self._start)
        line = f"data: {done / 1e6:,.0f} MB done, {rate / 1e6:.1f} MB/s"
        if self._total:
            done = min(done, self._total)
            left = (self._total - done) / rate
            wait = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min" if left < 6000 else f"{left / 3600:.1f} h"
            line = f"data: {done / self._total:.0%} of {self._total / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s, {wait} left"
        self._say(line)
