"""How a command ends: its exit code, and what becomes of an exception. No torch here, nor Hydra."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from data.config import DataError
from data.quiet import show_any_letter
from models.config import ModelError
from nvfp4_train import phase
from nvfp4_train.checkpoints.files import CheckpointError
from nvfp4_train.config import ConfigError
from nvfp4_train.lasting import tell, unread
from nvfp4_train.precision.config import PrecisionError

USER_MISTAKES = (ConfigError, ModelError, DataError, PrecisionError, CheckpointError)


class ExitCode(IntEnum):
    """What a command's exit code says; the table for users is in this folder's README."""

    DONE = 0
    INTERNAL = 1
    MISTAKE = 2
    GAP = 3
    NON_FINITE = 4
    INTERRUPTED = 75


class PeerEnded(Exception):
    """The run ends because of another rank: names it and what became of it.

    Attributes:
        code: that this process ends with, the one of the rank that ended first.
        found_here: whether this rank must say it to its launcher: it alone found out, or the other one is a process of
            another node.
    """

    def __init__(self, text: str, code: int, *, found_here: bool) -> None:
        super().__init__(text)
        self.code, self.found_here = code, found_here


def guarded(body: Callable[[], int | None]) -> int:
    """Calls `body` and makes exit codes of exceptions: a message for a user's mistake, a traceback for all others.

    Of several ranks the one whose error ends the run also leaves it to the launcher, which says it last.
    """
    show_any_letter()
    try:
        code = int(body() or ExitCode.DONE)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where what can't be written has a meaning, not as Python ends
        return code
    except (SystemExit, GeneratorExit):
        raise
    except PeerEnded as error:
        tell(f"{where()}{error}")
        if error.found_here:
            leave_reason(str(error), error.code)
        return error.code
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, BrokenPipeError) and unread():  # `| head` has seen enough
            return ExitCode.DONE
        code = code_of(error)
        if code == ExitCode.INTERNAL:
            tell(traceback.format_exc().rstrip())
        said = described(error)
        tell(f"{where()}{said}")
        if code != ExitCode.INTERRUPTED:
            leave_reason(said, code)
        return code


def code_of(error: BaseException) -> ExitCode:
    """The exit code of a process that an exception ends."""
    if isinstance(error, USER_MISTAKES):
        return ExitCode.MISTAKE
    return ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.INTERNAL


def described(error: BaseException) -> str:
    """`error: MESSAGE` for a user's mistake, `failed: TYPE: MESSAGE` for all others."""
    if isinstance(error, USER_MISTAKES):
        return f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted before there was anything to save"
    return f"failed: {type(error).__name__}: {error}"


def leave_reason(text: str, code: int) -> None:
    """Writes why this process ends, and with which exit code, where torch's launchers look for it; they show it once
    all processes have ended. A signal that comes in between may change the process's own code, but not this one.

    The first reason stays. Nothing is written where no launcher asked for it.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    reason = {
        "message": f"in {phase.current()}: {text}",
        "extraInfo": {"timestamp": str(int(time.time())), "code": int(code)},
    }
    with suppress(OSError):  # it is said on the screen, too
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with open(file, "x", encoding="utf-8") as opened:
            json.dump({"message": reason}, opened)


def on_this_node(rank: int) -> bool:
    """Whether this process's launcher started that rank too, and so sees itself what becomes of it."""
    first = int(os.environ.get("RANK", 0)) - int(os.environ.get("LOCAL_RANK", 0))
    return first <= rank < first + int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def where() -> str:
    """Rank, host and phase, where there are several ranks."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return ""
    return f"[rank {os.environ.get('RANK', '?')} on {socket.gethostname()}, in {phase.current()}] "
