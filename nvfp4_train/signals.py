"""SIGINT and SIGTERM: the first asks for an orderly stop, the second leaves at once. No torch here."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

from nvfp4_train.exits import ExitCode

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
