"""How a command ends: its exit code, and what becomes of an exception. No torch here, nor Hydra."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum

from data.config import DataError
from models.config import ModelError
from nvfp4_train.checkpoint_files import CheckpointError
from nvfp4_train.config import ConfigError
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


def guarded(body: Callable[[], int | None]) -> int:
    """Calls `body` and makes exit codes of exceptions: a message for a user's mistake, a traceback for all others."""
    try:
        return int(body() or ExitCode.DONE)
    except USER_MISTAKES as error:
        print(f"{_where()}error: {error}", file=sys.stderr, flush=True)
        return ExitCode.MISTAKE
    except KeyboardInterrupt:
        print(f"{_where()}interrupted before there was anything to save", file=sys.stderr, flush=True)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except Exception as error:
        traceback.print_exc()
        print(f"{_where()}failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return ExitCode.INTERNAL


def _where() -> str:
    """Rank and host, where there are several."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return ""
    return f"[rank {os.environ.get('RANK', '?')} on {socket.gethostname()}] "
