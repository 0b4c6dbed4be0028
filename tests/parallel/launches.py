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
Jobs = Mapping[str, Sequence[str]]


def launch(
    folder: Path, jobs: Mapping[int, Jobs], worker: str = "tests.parallel.worker", timeout: float = 900
) -> dict[str, Ranks]:
    """What every rank found in each job, by job.

    Args:
        jobs: number of processes -> name -> overrides; the numbers one after the other, all from one start, so that
            libraries are imported once.
        worker: module that does them, see `worker.main`.
        timeout: seconds for all of them.
    """
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps({size: dict(named) for size, named in jobs.items()}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", worker, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    logs = "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in sorted(folder.glob("log*")))
    assert done.returncode == 0, f"{done.stdout}\n{logs}"
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(size)]
        for size, named in jobs.items()
        for name in named
    }
