"""`launch.run` with processes that are forked, not started: torch and Megatron are imported once for all of them.

All else is the launcher's own: `main` below runs `launch.run.main` in a process of its own, whose agent starts its
ranks through torch's context of subprocesses; only the handler of one process is another. The process that calls it
must have no threads and no process groups.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing import api

from launch import run as launcher
from nvfp4_train import trainer  # noqa: F401 (what is imported here, no rank imports again)
from nvfp4_train.train import main as train

Before = Callable[[list[str]], Callable[[], None]]


class ForkedProcess:
    """What of `subprocess.Popen` the agent uses, for a fork of this process."""

    def __init__(self, body: Callable[[], int]) -> None:
        self.returncode: int | None = None
        self.pid = fork(body)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal while it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Handler:
    """In place of torch's SubprocessHandler."""

    def __init__(self, before: Before, args: Sequence[str], env: dict[str, str], local_rank_id: int) -> None:
        self.local_rank_id = local_rank_id
        self.proc = ForkedProcess(lambda: rank(before, args[args.index("nvfp4_train.train") + 1 :], env))

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """See torch's."""
        if self.proc.poll() is None:
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


def fork(body: Callable[[], int]) -> int:
    """A child that does `body` and leaves with its exit code, without what this process would do at its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the launcher's store has a thread, of which a child has no need
        pid = os.fork()
    if pid == 0:
        _child(body)
    return pid


def _child(body: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)  # as after an exec
        code = body()
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def rank(before: Before, overrides: Sequence[str], env: dict[str, str]) -> int:
    """One process of the run."""
    os.setsid()  # as torch starts them
    os.environ.update(env)
    return command(before, overrides)


def command(before: Before, overrides: Sequence[str]) -> int:
    """The training command; see `launch` for `before`."""
    own = list(overrides)
    after = before(own)
    code = train(own)
    after()
    return code


def alone(overrides: Sequence[str], output: Path, before: Before) -> ForkedProcess:
    """The training command, forked, as it is without a launcher: one process. Arguments as of `launch`."""

    def body() -> int:
        _print_to(output)
        return command(before, overrides)

    return ForkedProcess(body)


def launch(options: Sequence[str], output: Path, before: Before) -> ForkedProcess:
    """The launcher, forked, with both outputs of all its processes in a file.

    Args:
        options: of `launch.run`, overrides included.
        before: called in each rank when it begins, with its overrides, which it may change; returns what is called when
            the training command has returned.
    """

    def handler(*, args: tuple[str, ...], env: dict[str, str], local_rank_id: int, **_: Any) -> Handler:
        return Handler(before, args, env, local_rank_id)

    def body() -> int:
        _print_to(output)
        api.get_subprocess_handler = handler  # type: ignore[assignment]
        return launcher.main(options)

    return ForkedProcess(body)


def _print_to(output: Path) -> None:
    """From here on this process is one that a user starts in a shell, with both outputs in a file."""
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.pop("RANK", None)
    os.environ.pop("WORLD_SIZE", None)
