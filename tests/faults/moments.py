"""Moments of a run at which it is hit: the n-th call within a phase. The same in every run of a plan.

A process counts the calls of Python and C functions that its main thread makes within the phase it was told of, and at
the n-th sends the signal: to itself, or to the launcher. Phase and call depend on nothing but the plan, so a run can be
had again from its seed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from nvfp4_train import phase

LAUNCHER = -1
KINDS = ("start", "data", "forward", "backward", "update", "evaluation", "save", "end")


@dataclass(frozen=True)
class Hit:
    """One fault.

    Attributes:
        signal: its name.
        target: the rank that is hit, or LAUNCHER.
        rank: whose calls are counted: the target, or any for the launcher.
        kind: the first word of the phase.
        occurrence: which phase of that kind since the start of the process, from 1 on.
        call: which call within it, from 1 on.
    """

    signal: str
    target: int
    rank: int
    kind: str
    occurrence: int
    call: int

    def __str__(self) -> str:
        who = "launcher" if self.target == LAUNCHER else f"rank {self.target}"
        return f"-{self.signal.removeprefix('SIG')} {who} in {self.kind} {self.occurrence} call {self.call}"


class Moments:
    """Listens to the phases of this process; counts calls, or hits.

    Args:
        folder: where `plan.json` lies, and where what happened is written.
        counting: write how many calls each phase had, as `calls.RANK.json`, and hit nothing.
    """

    def __init__(self, folder: Path, rank: int, *, counting: bool) -> None:
        self._folder, self._rank, self._counting = folder, rank, counting
        self._kind, self._seen = "", dict.fromkeys(KINDS, 0)
        self._calls = 0
        self._counts: list[tuple[str, int]] = []
        self._hit = None if counting else self._next_hit()

    def listen(self) -> None:
        """From here on every phase that this process enters is seen."""
        real = phase.enter

        def enter(name: str) -> None:
            real(name)
            self._enter(name.split()[0])

        phase.enter = enter  # type: ignore[assignment]
        (self._folder / f"pid.{self._rank}").write_text(str(os.getpid()))

    def write_counts(self) -> None:
        """At the end of a counting run."""
        sys.setprofile(None)
        if self._counting:
            self._counts.append((self._kind, self._calls))
            (self._folder / f"calls.{self._rank}.json").write_text(json.dumps(self._counts))

    def _next_hit(self) -> tuple[int, Hit] | None:
        """The first of the plan that has not struck yet, where it is this rank's to count."""
        plan = json.loads((self._folder / "plan.json").read_text())
        number = next((number for number in range(len(plan)) if not (self._folder / f"struck.{number}").exists()), None)
        if number is None or plan[number]["rank"] != self._rank:
            return None
        return number, Hit(**plan[number])

    def _enter(self, kind: str) -> None:
        if self._counting and self._kind:
            self._counts.append((self._kind, self._calls))
        self._kind, self._calls = kind, 0
        self._seen[kind] += 1
        hit = self._hit
        begins = hit is not None and (hit[1].kind, hit[1].occurrence) == (kind, self._seen[kind])
        if self._counting or begins:
            sys.setprofile(self._count)

    def _count(self, _frame: FrameType, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            self._calls += 1
            if self._hit is not None and self._calls >= self._hit[1].call:
                number, hit = self._hit
                self._hit = None
                sys.setprofile(None)
                self._strike(number, hit)

    def _strike(self, number: int, hit: Hit) -> None:
        record = {**asdict(hit), "in": phase.current(), "time": time.time()}
        (self._folder / f"struck.{number}").write_text(json.dumps(record))
        os.kill(os.getppid() if hit.target == LAUNCHER else os.getpid(), signal.Signals[hit.signal])
