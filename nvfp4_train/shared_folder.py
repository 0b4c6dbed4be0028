"""Whether all nodes of a run see one run folder. Where each has its own, the first save would find out, hours later."""

from __future__ import annotations

import os
import secrets
import socket
import time
from functools import partial
from pathlib import Path

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


def _write(file: Path, token: str) -> None:
    with open(file, "w") as opened:
        opened.write(token)
        opened.flush()
        os.fsync(opened.fileno())


def _reads(file: Path, token: str, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while True:
        try:
            if file.read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
