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
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from launch.roll_call import RollCall
from nvfp4_train.exits import ExitCode

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PATIENCE = 4.0  # seconds for the others to leave by themselves once one has ended; as many more once they were told
LAST = 20.0  # seconds from the first process that is done to the last one: nobody watches them any more
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
        self._asked = self._starting = False
        self._early: int | None = None
        self._done_since: float | None = None
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"  # torch's own handlers: these are ours
        for number in STOP_SIGNALS:
            signal.signal(number, self._ask_to_stop)

    def _ask_to_stop(self, number: int, _frame: FrameType | None) -> None:
        """Each signal is one for the processes: the first lets them save, the second leaves at once."""
        self._asked, self._remaining_restarts = True, 0
        if self._starting:  # not all are there to be asked
            self._early = number
            return
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
        self._starting = True
        # Slurm may send its signal to every process of the step: it is this one's alone.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            started = super()._start_workers(worker_group)
            assert self._pcontext is not None
            self._pcontext.close = partial(self._close, self._pcontext.close)  # type: ignore[method-assign]
            worker_group.state = WorkerState.HEALTHY  # as torch says next: from here on a signal is for them
        finally:
            self._starting = False
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        if self._early is not None:
            self._ask_to_stop(self._early, None)
        return started

    def _close(
        self, close: Callable[..., None], death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None
    ) -> None:
        """Ends this node's processes. They hear of each other's end, and have `timeout` seconds to say why and leave: a
        signal meanwhile would have them leave without a word, or, where they were asked before, without saving.
        """
        deadline = time.monotonic() + (PATIENCE if timeout is None else timeout)
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        close(death_sig, timeout=PATIENCE)

    def _alive(self) -> bool:
        """Whether a process of this node is still there."""
        return any(handler.proc.poll() is None for handler in self._handlers())

    def _handlers(self) -> Iterable[Any]:
        assert isinstance(self._pcontext, SubprocessContext)
        return self._pcontext.subprocess_handlers.values()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._failed(result.failures)
        elif result.state == WorkerState.HEALTHY and (gone := self._calls.ended()) is not None:
            assert self._pcontext is not None
            self._pcontext.close()  # what they still have to say comes before the reason
            _say(str(gone))
            self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED)
        elif result.state == WorkerState.HEALTHY:
            self._end_the_last()
        elif result.state == WorkerState.SUCCEEDED:
            self._calls.finished()
        return result

    def _end_the_last(self) -> None:
        """Ends processes of this node that are still there LAST seconds after one, here or elsewhere, was done."""
        assert self._pcontext is not None
        if any(handler.proc.poll() == 0 for handler in self._handlers()):
            self._calls.finished()
        if not self._calls.is_finished():
            self._done_since = None
        elif self._done_since is None:
            self._done_since = time.monotonic()
        elif time.monotonic() - self._done_since > LAST:
            _say(f"some processes are still there {LAST:g} s after others were done; they are ended")
            self._pcontext.close(timeout=0)

    def _failed(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Says what happened and what follows, and ends the run for all nodes where nothing follows."""
        rank, failure = decisive(failures)
        code = code_of(failure)
        if self._asked and code == -signal.SIGTERM:  # it was asked before it could listen
            code = ExitCode.INTERRUPTED
        happened = f"rank {rank} on {socket.gethostname()} {described(failure)}"
        if code in FINAL or self._remaining_restarts == 0:
            self._remaining_restarts = 0
            self._calls.end(code if code > 0 else ExitCode.INTERNAL, happened)
            _say(happened)
        else:
            number = self._restarts - self._remaining_restarts + 1
            _say(f"restart {number} of {self._restarts} goes on from the last checkpoint: {happened}")


def decisive(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Rank and end of the process whose end counts: the first that gave a reason, else one with a mistake or bad
    numbers, else the one that was seen first; where that is an error, one that was killed.

    Those that waited for it or were told to leave because of it give no reason and may have codes of their own.
    """
    reasons = {rank: failure for rank, failure in failures.items() if reason(failure)}
    if reasons:
        return min(reasons.items(), key=lambda item: item[1].timestamp)
    first = next(iter(failures.items()))
    final = [item for item in failures.items() if item[1].exitcode in (ExitCode.MISTAKE, ExitCode.NON_FINITE)]
    killed = [item for item in failures.items() if item[1].exitcode < 0 and first[1].exitcode == ExitCode.INTERNAL]
    return [*final, *killed, first][0]


def reason(failure: ProcessFailure) -> str:
    """What the process said of its end, empty where it said nothing."""
    return failure.message["message"] if isinstance(failure.message, dict) else ""


def code_of(failure: ProcessFailure) -> int:
    """The exit code that the process meant: a signal may have come while it was leaving."""
    meant = failure.message["extraInfo"].get("code") if isinstance(failure.message, dict) else None
    return failure.exitcode if meant is None else int(meant)


def described(failure: ProcessFailure) -> str:
    """`ended with exit code 1 (internal), in backward of step 3: failed: ValueError: ...`, or what killed it."""
    code = code_of(failure)
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    named = f" ({ExitCode(code).name.lower().replace('_', '-')})" if code in set(ExitCode) else ""
    said = reason(failure)
    return f"ended with exit code {code}{named}" + (f", {said}" if said else "")


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
