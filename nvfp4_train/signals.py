"""SIGINT and SIGTERM: the first asks for an orderly stop, the second leaves at once. No torch here.

Before there is a run, while libraries are imported, the first leaves at once: an exception in the midst of an import
would surface as a traceback, or be swallowed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nvfp4_train.exits import ExitCode

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def leave_at_once() -> Iterator[None]:
    """Inside the block either signal ends the process with INTERRUPTED and one line."""

    def leave(number: int, _frame: FrameType | None) -> None:
        os.write(2, f"{signal.Signals(number).name}: interrupted, with no step under way\n".encode())
        os._exit(ExitCode.INTERRUPTED)

    former = {number: signal.signal(number, leave) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class StopSignals:
    """Context that listens to both signals and restores the former handlers when it ends.

    Attributes:
        received: name of the first signal, None before it.
        finish_steps: while True the first signal waits for the loop to look at `received`; before, in set-up, it raises
            KeyboardInterrupt where it strikes.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.finish_steps = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is not None:
            os.write(2, f"\n{name} again: leaving at once, without saving\n".encode())
            os._exit(ExitCode.INTERRUPTED)
        self.received = name
        if not self.finish_steps:
            raise KeyboardInterrupt
        os.write(2, f"\n{name}: finishing this step, then saving; once more leaves at once\n".encode())
