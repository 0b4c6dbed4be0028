"""Starts a worker in several processes, and reads what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Ranks = list[dict[str, Any]]


def launch(
    folder: Path, processes: int, jobs: Mapping[str, Sequence[str]], worker: str = "tests.parallel.worker"
) -> dict[str, Ranks]:
    """What every rank found in each job, by job; one start of `processes` processes for all of them."""
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps({name: list(overrides) for name, overrides in jobs.items()}))
    command = [sys.executable, "-W", "ignore", "-m", worker]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = {**os.environ, **threads, "WORLD_SIZE": str(processes)}
    logs = [folder / f"log{rank}" for rank in range(processes)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(folder)], stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(codes), "\n".join(f"rank {rank}: {log.read_text()[-3000:]}" for rank, log in enumerate(logs))
    return {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(processes)] for name in jobs}
