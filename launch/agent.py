"""One node's part of a run: torchrun's agent, which starts and watches this node's processes, with three differences.

- What a restart can't mend is not restarted: a mistake, numbers that went bad, an orderly stop.
- A signal asks the processes to finish their step and save, however long that takes; torchrun kills them after 30 s.
- When one node ends, all end, with its exit code.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from launch.roll_call import RollCall
from nvfp4_train.exits import ExitCode

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
FINAL = (ExitCode.MISTAKE, ExitCode.NON_FINITE, ExitCode.INTERRUPTED)


class NodeAgent(LocalElasticAgent):
    """Runs `python -m nvfp4_train.train` in several processes of this node until all nodes are done.

    Args:
        calls: how the nodes meet.
        processes: of this node.
        restarts: how often this node starts its processes anew after a crash.
        interval: seconds between two looks at them.
        overrides: arguments of the training command.
        logs: an empty folder for torch's own files.
    """

    def __init__(
        self, calls: RollCall, processes: int, restarts: int, interval: float, overrides: Sequence[str], logs: str
    ) -> None:
        spec = WorkerSpec(
            role="train",
            local_world_size=processes,
            entrypoint=sys.executable,
            args=("-u", "-m", "nvfp4_train.train", *overrides),
            rdzv_handler=calls,
            max_restarts=restarts,
            monitor_interval=interval,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=logs))
        self._calls, self._restarts = calls, restarts
        self._asked = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._ask_to_stop)

    def _ask_to_stop(self, number: int, _frame: FrameType | None) -> None:
        """Each signal is one for the processes: the first lets them save, the second leaves at once."""
        self._asked, self._remaining_restarts = True, 0
        if self._worker_group.state != WorkerState.HEALTHY or self._pcontext is None:
            raise KeyboardInterrupt
        _say(f"{signal.Signals(number).name}: asking the processes of this node to save and leave")
        for pid in self._pcontext.pids().values():
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._asked:
            raise KeyboardInterrupt
        # Slurm may send its signal to every process of the step: it is this one's alone.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            started = super()._start_workers(worker_group)
        finally:
            for number in STOP_SIGNALS:  # torch has put in its own
                signal.signal(number, self._ask_to_stop)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._failed(result.failures)
        elif result.state == WorkerState.HEALTHY and (gone := self._calls.ended()) is not None:
            _say(str(gone))
            self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED)
        return result

    def _failed(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Says what happened and what follows, and ends the run for all nodes where nothing follows."""
        rank, code = decisive(failures)
        happened = f"rank {rank} on {socket.gethostname()} {_described(code)}"
        if code in FINAL or self._remaining_restarts == 0:
            self._remaining_restarts = 0
            self._calls.end(code if code > 0 else ExitCode.INTERNAL)
            _say(happened)
        else:
            number = self._restarts - self._remaining_restarts + 1
            _say(f"{happened}; restart {number} of {self._restarts} goes on from the last checkpoint")


def decisive(failures: Mapping[int, ProcessFailure]) -> tuple[int, int]:
    """Rank and exit code of the process whose end counts: a mistake or bad numbers, else the one that was seen first.

    Those that were told to leave because of it come after it, and may have codes of their own.
    """
    for rank, failure in failures.items():
        if failure.exitcode in (ExitCode.MISTAKE, ExitCode.NON_FINITE):
            return rank, failure.exitcode
    rank, first = next(iter(failures.items()))
    return rank, first.exitcode


def _described(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    named = f" ({ExitCode(code).name.lower().replace('_', '-')})" if code in set(ExitCode) else ""
    return f"ended with exit code {code}{named}"


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
