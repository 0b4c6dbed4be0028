"""SIGINT and SIGTERM: the first asks for an orderly stop, the second leaves at once. The end of the launcher asks too.
No torch here.

Before there is a run, while libraries are imported, the first leaves at once: an exception in the midst of an import
would surface as a traceback, or be swallowed.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nvfp4_train.exits import ExitCode

_LAUNCHER_GONE = signal.SIGHUP  # also several times: once for each thread that the launcher had
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def _signals() -> tuple[signal.Signals, ...]:
    """Those that ask to stop. A process without a launcher leaves SIGHUP to nohup."""
    asked = (signal.SIGINT, signal.SIGTERM)
    return (*asked, _LAUNCHER_GONE) if _launched() else asked


def _launched() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_launcher() -> None:
    """A process that a launcher started is asked to save and leave when that launcher dies: nobody would restart it,
    and it would keep others out of its run folder.
    """
    if _launched():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _LAUNCHER_GONE)


@contextmanager
def leave_at_once() -> Iterator[None]:
    """Inside the block each signal ends the process with INTERRUPTED and one line."""

    def leave(number: int, _frame: FrameType | None) -> None:
        os.write(2, f"{signal.Signals(number).name}: interrupted, with no step under way\n".encode())
        os._exit(ExitCode.INTERRUPTED)

    former = {number: signal.signal(number, leave) for number in _signals()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class StopSignals:
    """Context that listens to these signals and restores the former handlers when it ends.

    Attributes:
        received: name of the first signal, None before it.
        finish_steps: while True the first signal waits for the loop to look at `received`; before, in set-up, it raises
            KeyboardInterrupt where it strikes.
        leaving: True once an error ends the run. The first signal from then on is only noted: a launcher sends one to
            processes that another one's end has already reached, and they still have to say so.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.finish_steps = self.leaving = self._noted = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in _signals():
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.leaving and not self._noted:
            self.received, self._noted = self.received or name, True
            return
        if self.received is not None and number == _LAUNCHER_GONE:
            return
        if self.received is not None:
            os.write(2, f"\n{name} again: leaving at once, without saving\n".encode())
            os._exit(ExitCode.INTERRUPTED)
        self.received = name
        if not self.finish_steps:
            raise KeyboardInterrupt
        why = "the launcher is gone" if number == _LAUNCHER_GONE else name
        os.write(2, f"\n{why}: finishing this step, then saving; once more leaves at once\n".encode())
