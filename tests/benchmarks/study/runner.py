"""Trains cells, several processes a GPU and all GPUs at once, until they are done or the time is over.

A cell that does not fit into what is left is not started; one that is still at work when the time is over is told to
stop, saves a checkpoint in its run folder, and goes on from there when it is taken again on the same machine (120 MB a
nano run: elsewhere it starts anew). What is finished is kept at once, so nothing is lost with the machine.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock

from nvfp4_train.comparison.runs import open_run
from nvfp4_train.exits import ExitCode
from tests.benchmarks.study.cells import Cell, Plan
from tests.benchmarks.study.store import Record, Store, record
from tests.benchmarks.training_runs import failure, finished, start_training

SAVING_S = 25.0  # to finish a step and save, at the end of the time
START_S = 25.0  # of a process, to its first step
SPARE = 1.1  # steps take this much longer than the slowest so far, at most
MOST_FAILURES = 3
RESULTS = (ExitCode.DONE, ExitCode.NON_FINITE)  # a run that diverged is a result
COMPOSING = Lock()  # Hydra has one state for all threads

Say = Callable[[str], None]


@dataclass(frozen=True)
class Slot:
    """Where one run at a time goes.

    Attributes:
        environment: of its process.
        threads: of its process.
        delay: seconds before its first run. Runs are about as long as each other, so slots of one GPU that begin
            together would go on starting their processes together, and leave the GPU idle meanwhile.
    """

    environment: Mapping[str, str]
    threads: int
    delay: float = 0.0


def slots(devices: int, jobs: int, cores: int) -> list[Slot]:
    """`jobs` slots on each GPU, or on the CPU where there is none; neighbours are on different GPUs."""
    count = max(1, devices) * jobs
    threads = max(1, cores // count)
    if not devices:
        return [Slot({}, threads)] * count
    return [
        Slot({"CUDA_VISIBLE_DEVICES": str(number % devices)}, threads, number // devices * START_S)
        for number in range(count)
    ]


@dataclass
class Queue:
    """The cells of one call: what is next, and how long it will take.

    Attributes:
        deadline: of `clock`, by which a cell must have ended; None for no limit.
        pace: seconds a token of each row's steps, as last seen with as many jobs.
    """

    waiting: deque[tuple[Plan, Cell]]
    deadline: float | None
    pace: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    stopped: Event = field(default_factory=Event)
    lock: Lock = field(default_factory=Lock)

    def next(self) -> tuple[Plan, Cell] | None:
        """The next cell, or None where there is none or the time does not suffice for it."""
        with self.lock:
            if self.stopped.is_set() or not self.waiting:
                return None
            needed = self.needed(*self.waiting[0])
            if self.deadline is not None and self.clock() + (needed or 0.0) > self.deadline:
                return None
            return self.waiting.popleft()

    def needed(self, plan: Plan, cell: Cell) -> float | None:
        """Seconds that a cell will take: as its row took last, else as the slowest row; None where nothing is known."""
        pace = self.pace.get(cell.row.name) or max(self.pace.values(), default=None)
        return None if pace is None else START_S + SPARE * pace * plan.tokens

    def took(self, found: Record) -> None:
        """Learn from a finished run."""
        with self.lock:
            self.pace[found.row] = found.seconds / found.tokens


def missing(plan: Plan, cells: Iterable[Cell], records: Iterable[Record]) -> list[tuple[Plan, Cell]]:
    """The cells that have no line yet, or one of another set-up alone."""
    done = {one.cell for one in records if one.setup == plan.setup}
    return [(plan, cell) for cell in cells if (cell.length.name, cell.row.name, cell.seed) not in done]


def run_cells(queue: Queue, places: list[Slot], folder: Path, store: Store, say: Say) -> list[str]:
    """Train cells of `queue` in `places` at once, their runs in `folder`, and keep what is finished.

    Returns:
        What failed, one text a cell. After three failures none is started any more.
    """
    failures: list[str] = []

    def work(slot: Slot) -> None:
        queue.stopped.wait(slot.delay)
        while (taken := queue.next()) is not None:
            try:
                _train(*taken, slot, len(places), folder, queue, store, say)
            except Exception as error:  # one cell must not hide the others
                failures.append(f"{taken[1].name}: {error}")
                say(failures[-1])
                if len(failures) >= MOST_FAILURES:
                    queue.stopped.set()

    with ThreadPoolExecutor(len(places)) as pool:
        futures = [pool.submit(work, slot) for slot in places]
        try:
            for future in futures:
                future.result()
        except KeyboardInterrupt:  # the processes have it from the terminal, too: they save and end
            queue.stopped.set()
            raise
    return failures


def _train(plan: Plan, cell: Cell, slot: Slot, jobs: int, folder: Path, queue: Queue, store: Store, say: Say) -> None:
    """One cell to its end, or to the end of the time."""
    path = folder / f"{cell.name}-{plan.setup}"
    arguments = plan.overrides(cell, path)
    if not _there(path, arguments):
        process = start_training(path, arguments, slot.threads, slot.environment)
        code = _wait(process, None if queue.deadline is None else queue.deadline - SAVING_S - queue.clock())
        if code == ExitCode.INTERRUPTED and not _there(path, arguments):
            say(f"{cell.name}: not finished in time; saved in {path}")
            return
        if code not in (*RESULTS, ExitCode.INTERRUPTED):
            raise failure(path, code)
    with COMPOSING:
        found = record(plan, cell, path, jobs)
    store.add(found, open_run(path))
    queue.took(found)
    say(
        f"{cell.name:<40} {found.seconds:6.0f} s of steps, {found.step_ms:6.1f} ms a step, "
        f"loss {found.train_loss:.4f}, validation {found.val_loss:.4f}; {len(queue.waiting)} wait"
    )


def _there(path: Path, arguments: list[str]) -> bool:
    with COMPOSING:
        return finished(path, arguments)


def _wait(process: subprocess.Popen[bytes], seconds: float | None) -> int:
    """The exit code; after `seconds` the process is told to stop, which it does when it has saved: INTERRUPTED."""
    try:
        return process.wait(None if seconds is None else max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(SAVING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return code if code in RESULTS else ExitCode.INTERRUPTED  # it may not have come as far as to listen to signals
