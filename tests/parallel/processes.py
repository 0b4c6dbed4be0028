"""A worker's jobs on GPUs: in processes that meet for each of them as torchrun's do, and part again.

With fewer GPUs than processes all of them take the first. NCCL refuses that within a host; so to NCCL each process is a
host (NCCL_HOSTID), and they talk over sockets: the same collectives, at a speed that says nothing.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

_WITH_PARENT = 1  # PR_SET_PDEATHSIG
LIMIT = 120.0  # seconds for a job; the first compiles kernels
SHARED = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

Run = Callable[[list[str], int], dict[str, Any]]


def fork(action: Callable[[], None]) -> int:
    """The number of a process that does `action` and ends."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        ctypes.CDLL(None).prctl(_WITH_PARENT, signal.SIGKILL)  # who waits in a collective would stay for ever
        try:
            action()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    return process


def log_to(file: Path) -> None:
    """From here on both outputs of this process go there."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def do_each(run: Run, folder: Path, jobs: Mapping[str, list[str]], size: int, gpus: int) -> list[str]:
    """Every job in `size` processes; after one that fails, or takes longer than LIMIT, others go on behind it.

    Returns:
        Those that failed.
    """
    left, failed = list(jobs), []
    while left:
        ports = free_ports(len(left))
        ranks = {
            fork(partial(_do, run, folder, {name: jobs[name] for name in left}, ports, rank, size, gpus))
            for rank in range(size)
        }
        _see_through(ranks, folder, left, size)
        done = _done(folder, left, size)
        failed += left[done : done + 1]
        left = left[done + 1 :]
    return failed


def free_ports(count: int) -> list[int]:
    """So many ports that nobody has."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in servers]


def _see_through(ranks: set[int], folder: Path, names: Sequence[str], size: int) -> None:
    """Until all have ended; kills the others when one fails or a job takes too long."""
    done, since, sound = 0, time.monotonic(), True
    while ranks:
        process, status = os.waitpid(-1, os.WNOHANG)
        ranks.discard(process)
        if (now := _done(folder, names, size)) > done:
            done, since = now, time.monotonic()
        if sound and (status or time.monotonic() - since > LIMIT):
            sound = False
            for other in ranks:
                os.kill(other, signal.SIGKILL)
        elif not process:
            time.sleep(0.05)


def _done(folder: Path, names: Sequence[str], size: int) -> int:
    """How many jobs, from the first on, every rank has done."""
    whole = [all((folder / f"{name}.{rank}.pt").exists() for rank in range(size)) for name in names]
    return (*whole, False).index(False)


def _do(
    run: Run, folder: Path, jobs: Mapping[str, list[str]], ports: Sequence[int], rank: int, size: int, gpus: int
) -> None:
    torch.set_num_threads(1)
    for (name, overrides), port in zip(jobs.items(), ports, strict=True):
        log_to(folder / f"log {name}.{rank}")
        faulthandler.dump_traceback_later(LIMIT - 5)
        os.environ.update(variables(rank, size, gpus, port))
        part = folder / f"{name}.{rank}.part"
        torch.save(run(overrides, size), part)
        part.rename(part.with_suffix(".pt"))
    faulthandler.cancel_dump_traceback_later()


def variables(rank: int, size: int, gpus: int, port: int) -> dict[str, str]:
    """What torchrun sets, and what lets NCCL share a GPU; nothing for one process."""
    if size == 1:
        return {}
    shared = gpus < size
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0 if shared else rank, "MASTER_PORT": port}
    found = {"MASTER_ADDR": "localhost", **{name: str(number) for name, number in numbers.items()}}
    return found | {"NCCL_HOSTID": f"host {rank}", **SHARED} if shared else found
