"""Runs started as a user starts them: two processes, in folders of their own."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.trainer.conftest import TINY

STEPS = 30
ROOT = Path(__file__).parents[2]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "far"]

Overrides = Callable[[Path], list[str]]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> Overrides:
    """`overrides(run_dir)`: the arguments of a tiny run, of the same corpus and length whatever its folder."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    (folder / "text").mkdir()
    for number in range(60):
        (folder / "text" / f"{number:02}.txt").write_text(" ".join(draw.choices(WORDS, k=100)) + "\n")
    data = [f"data.path={folder / 'text'}", f"data.prepared={folder / 'prepared'}"]
    short = [f"steps={STEPS}", "checkpoint.every=10", "checkpoint.keep=0", "evaluation.every=0"]
    return lambda run_dir: [*TINY, *data, *short, f"run_dir={run_dir}"]


def start(command: list[str], output: Path, folder: Path = ROOT, **variables: str) -> subprocess.Popen[bytes]:
    """A process in a folder, by default the clone's root, with one thread a process and both outputs in a file."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **variables}
    with output.open("ab") as file:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)


def launcher(*arguments: str) -> list[str]:
    """The command line of `launch.run`."""
    return [sys.executable, "-m", "launch.run", *arguments]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], output: Path) -> None:
    """Look again and again until `condition` holds while the process lives."""
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, output.read_text(encoding="utf-8")
        assert time.monotonic() < deadline, output.read_text(encoding="utf-8")
        time.sleep(0.01)


def lines_of(file: Path) -> int:
    """How many lines a file has, 0 where there is none."""
    return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0


def children(pid: int) -> list[int]:
    """Process numbers of a process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def free_port() -> int:
    """A port that nobody has, nor is given meanwhile: none of those that the system hands out by itself."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    while True:
        port = random.SystemRandom().randrange(1024, max(given, 2048))
        with suppress(OSError), socket.create_server(("", port)):
            return port
