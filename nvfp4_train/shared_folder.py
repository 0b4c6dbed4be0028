"""Whether all nodes of a run see one run folder, and the same checkpoints in it. Where each has its own, the first save
would find out, hours later.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nvfp4_train.checkpoints.files import SUMS, latest
from nvfp4_train.config import ConfigError
from nvfp4_train.distributed import World, gather, on_main

PATIENCE = 10.0  # seconds for a network file system to show a new file on another node


def check_shared(file: Path, world: World, patience: float = PATIENCE) -> None:
    """The main rank writes a token into `file`, and one rank of every node reads it.

    Args:
        file: in the run folder, of no other use; it exists.
        patience: seconds to try for.

    Raises ConfigError on all ranks, with the nodes that do not see it.
    """
    if world.size == 1:
        return
    token = gather(secrets.token_hex(8), world)[0]
    on_main(world, partial(_write, file, token))
    asked = int(os.environ.get("LOCAL_RANK", 0)) == 0
    blind = asked and not _reads(file, token, patience)
    hosts = gather(socket.gethostname() if blind else None, world)
    if any(hosts):
        named = ", ".join(f"{host} (rank {rank})" for rank, host in enumerate(hosts) if host)
        raise ConfigError(
            f"run_dir={file.parent}: what rank 0 writes there is not seen on {named}. Every node writes its part of a "
            "checkpoint there: give a run_dir on a file system that all nodes share, mounted under the same path."
        )


def check_same_checkpoint(root: Path, start: Path | None, world: World, patience: float = PATIENCE) -> None:
    """One rank of every node sees what the main rank sees: the newest checkpoint, and the one that the run starts from.

    Args:
        root: the run's folder of checkpoints.
        start: the checkpoint to start from, of this or another run; None for a new run.
        patience: seconds to try for.

    Raises ConfigError on all ranks, with what the other nodes see.
    """
    if world.size == 1:
        return
    wanted = gather(_view(root, start), world)[0]
    asked = int(os.environ.get("LOCAL_RANK", 0)) == 0
    other = asked and not _until(lambda: _view(root, start) == wanted, patience)
    seen = gather(f"{socket.gethostname()} (rank {world.rank}) {_said(*_view(root, start))}" if other else None, world)
    differing = [said for said in seen if said]
    if differing:
        raise ConfigError(
            f"{root}: rank 0 {_said(*wanted)}, {'; '.join(differing)}. All nodes must see the same checkpoints: give a "
            "run_dir, and a resume=PATH, on a file system that they share, mounted under the same path."
        )


def _view(root: Path, start: Path | None) -> tuple[int | None, str | None, str | None]:
    """The newest checkpoint's step, the name of the one to start from, and a digest of its sums: None is not there."""
    if start is None:
        return latest(root), None, None
    try:
        return latest(root), start.name, hashlib.sha256((start / SUMS).read_bytes()).hexdigest()[:12]
    except OSError:
        return latest(root), start.name, None


def _said(newest: int | None, start: str | None, digest: str | None) -> str:
    """A view in words."""
    which = "no checkpoint" if newest is None else f"step {newest} as the newest checkpoint"
    whole = "" if start is None else f" and {start} " + (f"with sums {digest}" if digest else "not at all")
    return f"sees {which}{whole}"


def _write(file: Path, token: str) -> None:
    with open(file, "w", encoding="utf-8") as opened:
        opened.write(token)
        opened.flush()
        os.fsync(opened.fileno())


def _reads(file: Path, token: str, patience: float) -> bool:
    def found() -> bool:
        try:
            return file.read_text(encoding="utf-8") == token
        except OSError:
            return False

    return _until(found, patience)


def _until(condition: Callable[[], bool], patience: float) -> bool:
    """Whether `condition` holds within `patience` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
