"""A few runs of `make faults` as a user starts them: processes of their own, under `launch.run` and plain torchrun.

The hit comes when so many lines of metrics are written, not at a call that is counted within.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.faults.moments import LAUNCHER
from tests.faults.plan import LAYOUTS, STEPS, Plan

LAUNCH = ("-m", "launch.run", "--processes", "2", "--restarts", "2", "--")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2",
            "-m", "nvfp4_train.train")  # fmt: skip


@dataclass(frozen=True)
class Real:
    """One run: how it is started, which signal hits which local rank or LAUNCHER, after how many lines of metrics."""

    seed: int
    command: tuple[str, ...]
    signal: signal.Signals
    target: int
    after: int
    layout: str = next(iter(LAYOUTS))

    def __str__(self) -> str:
        how = "torchrun" if self.command == TORCHRUN else "launch.run"
        who = "launcher" if self.target == LAUNCHER else f"rank {self.target}"
        return f"-{self.signal.name.removeprefix('SIG')} {who} after step {self.after}, under {how}"


def reals(count: int = 5) -> list[Real]:
    """The first so many of these runs, numbered from 1001 on."""
    kinds = (
        (LAUNCH, signal.SIGKILL, 1),
        (TORCHRUN, signal.SIGSTOP, 0),
        (LAUNCH, signal.SIGKILL, LAUNCHER),
        (TORCHRUN, signal.SIGKILL, 1),
        (LAUNCH, signal.SIGTERM, LAUNCHER),
    )
    seeds = range(1001, 1001 + min(count, len(kinds)))
    return [
        Real(seed, *kind, random.Random(seed).randint(1, STEPS - 2)) for seed, kind in zip(seeds, kinds, strict=False)
    ]


class Started:
    """One start of a real run, which hits it when its moment has come. Behaves as `forked.ForkedProcess`."""

    def __init__(self, real: Real, where: Sequence[str], folder: Path) -> None:
        self._real, self._folder = real, folder
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        overrides = Plan(real.seed, real.layout, 2, ()).overrides(where)
        with (folder / "out").open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, *real.command, *overrides], env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, None while it runs; takes down who its ranks are, and hits one of them."""
        for rank, pid in enumerate(self._ranks()):
            (self._folder / f"pid.{rank}").write_text(str(pid))
        self._strike()
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """See `subprocess.Popen`."""
        return self._process.wait(timeout)

    def send_signal(self, number: int) -> None:
        """See `subprocess.Popen`."""
        self._process.send_signal(number)

    def _ranks(self) -> list[int]:
        with suppress(OSError):
            return sorted(
                map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="utf-8").split())
            )
        return []

    def _strike(self) -> None:
        metrics, struck = self._folder / "run" / "metrics.jsonl", self._folder / "struck.0"
        if struck.exists() or not metrics.exists() or len(metrics.read_bytes().splitlines()) < self._real.after:
            return
        found = self._ranks()
        if len(found) == 2:
            struck.write_text(f'{{"time": {time.time()}}}')
            os.kill(self.pid if self._real.target == LAUNCHER else found[self._real.target], self._real.signal)
