"""Starts a training run on one node or on many: `python -m launch.run [options] -- [overrides]`.

The same as torchrun, which works too, with what torchrun leaves to its user: see this folder's README.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from nvfp4_train.config import ConfigError
from nvfp4_train.exits import ExitCode, guarded
from nvfp4_train.signals import leave_at_once

PORT = 29500
HELP = f"""Starts a training run on this node; on many nodes, start it on each.

python -m launch.run [options] -- [overrides of nvfp4_train.train]

Options
  --processes P        on this node; by default one a GPU, or one without
  --restarts R         after a crash, start again from the last checkpoint up to R times (needs run_dir=); default 0
  --nodes N            nodes of the run; default 1
  --node-rank K        which of them this one is, 0 to N - 1
  --head HOST[:PORT]   node 0, as the others reach it; port {PORT} by default
  --wait SECONDS       how long a node waits for the others, at the start and after a crash; default 600
  --help, -h           this text

One node:    python -m launch.run --restarts 3 -- experiment=1b run_dir=runs/1b
Two nodes:   python -m launch.run --nodes 2 --node-rank 0 --head a01 -- experiment=1b run_dir=/shared/1b      # on a01
             python -m launch.run --nodes 2 --node-rank 1 --head a01 -- experiment=1b run_dir=/shared/1b      # on a02
Slurm:       sbatch --nodes 8 --gpus-per-node 8 --time 24:00:00 launch/slurm.sbatch -- experiment=1b

Exit codes are those of training, of the process that ended first: launch/README.md"""


@dataclass(frozen=True)
class Options:
    """A parsed command line. `processes` None: one a GPU."""

    processes: int | None
    restarts: int
    nodes: int
    node_rank: int
    host: str
    port: int
    wait: float
    overrides: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. Overrides of training go behind --; see --help.")


def parse(argv: Sequence[str]) -> Options:
    """Reads the command line; prints help and leaves for --help. ConfigError: what is wrong, and what to write."""
    parser = _Parser(prog="launch.run", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int)
    parser.add_argument("--head")
    parser.add_argument("--wait", type=float, default=600.0)
    end = argv.index("--") if "--" in argv else len(argv)
    known, overrides = parser.parse_args(argv[:end]), tuple(argv[end + 1 :])
    if known.help:
        print(HELP)
        raise SystemExit(ExitCode.DONE)
    for name, least in {"processes": 1, "restarts": 0, "nodes": 1, "wait": 0}.items():
        value = getattr(known, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: must be {least} or more.")
    rank, host, port = _where(known.nodes, known.node_rank, known.head)
    return Options(known.processes, known.restarts, known.nodes, rank, host, port, known.wait, overrides)


def _where(nodes: int, rank: int | None, head: str | None) -> tuple[int, str, int]:
    """Rank of this node, and host and port of node 0. One node alone takes any free port of its own."""
    if nodes == 1 and head is None and rank in (None, 0):
        return 0, "localhost", 0
    if nodes == 1 and None in (rank, head):
        raise ConfigError("--node-rank and --head are for several nodes. Give --nodes N too, or leave them out.")
    if rank is None or head is None:
        raise ConfigError(
            f"--nodes {nodes} needs --node-rank and --head on every node: its own rank from 0 to {nodes - 1}, and the "
            "name of node 0 as the others reach it, as in --node-rank 1 --head a01."
        )
    if not 0 <= rank < nodes:
        raise ConfigError(f"--node-rank {rank}: with --nodes {nodes} ranks go from 0 to {nodes - 1}.")
    host, colon, port = head.rpartition(":")
    if not colon:
        return rank, head, PORT
    if not (host and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"--head {head}: write HOST or HOST:PORT with a port from 1 to 65535, as in a01:{PORT}.")
    return rank, host, int(port)


def launch(options: Options) -> int:
    """Runs this node's part to the end of the run; returns the exit code of the run."""
    with _silent_libraries():
        import torch
    from torch.distributed import DistError

    from launch.agent import NodeAgent
    from launch.roll_call import NodeGone, Place, RollCall, brief, open_store

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what matters is said here
    processes = options.processes or torch.cuda.device_count() or 1
    if processes > 1:  # as torchrun does: processes share the cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    place = Place(options.node_rank, options.nodes, options.host, options.port, options.wait)
    store = open_store(place)  # which takes any free port for port 0
    calls = RollCall(store, replace(place, port=store.port), socket.gethostname())
    interval = 0.1 if options.nodes == 1 else 1.0  # each look of each node is a question to node 0
    try:
        with tempfile.TemporaryDirectory(prefix="launch-") as logs:
            result = NodeAgent(calls, processes, options.restarts, interval, options.overrides, logs).run()
        gone = calls.ended()
        return gone.code if result.is_failed() and gone is not None else ExitCode.DONE
    except NodeGone as gone:
        print(f"launch: {gone}", file=sys.stderr, flush=True)
        return gone.code
    except (ConfigError, KeyboardInterrupt) as error:
        calls.end(ExitCode.MISTAKE if isinstance(error, ConfigError) else ExitCode.INTERRUPTED)
        raise
    except DistError as error:
        print(f"launch: lost node 0 at {options.host}:{options.port} ({brief(error)})", file=sys.stderr, flush=True)
        return ExitCode.INTERNAL
    finally:
        with suppress(DistError):
            calls.shutdown()


@contextmanager
def _silent_libraries() -> Iterator[None]:
    """What torch's libraries log of a lost connection is a C++ stack. They read their level when they are loaded; the
    processes that are started choose their own.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    given = os.environ.get(name)
    os.environ.setdefault(name, "FATAL")
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    with leave_at_once():  # in the imports, and until node 0 answers
        signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGTERM))
        return guarded(lambda: launch(parse(sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
