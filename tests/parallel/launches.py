"""Starts a worker in several processes, and reads what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.metrics import Metrics, read_metrics

Ranks = list[dict[str, Any]]
Jobs = Mapping[str, Sequence[str]]


def launch(
    folder: Path, jobs: Mapping[int, Jobs], worker: str = "tests.parallel.worker", timeout: float = 900, gpus: int = 0
) -> dict[str, Ranks]:
    """What every rank found in each job, by job.

    Args:
        jobs: number of processes -> name -> overrides; the numbers one after the other, all from one start, so that
            libraries are imported once.
        worker: module that does them, see `worker.main`.
        timeout: seconds for all of them.
        gpus: to run on, see `processes`; 0 for the CPU.
    """
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps({size: dict(named) for size, named in jobs.items()}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if gpus:  # imports that ask for a GPU must not open it: no fork survives that
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", worker, str(folder), str(gpus)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    told = [log for log in sorted(folder.glob("log*")) if not (folder / f"{log.name.removeprefix('log ')}.pt").exists()]
    logs = "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in told)
    assert done.returncode == 0, f"{done.stdout}\n{logs}"
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(size)]
        for size, named in jobs.items()
        for name in named
    }


class Runs:
    """Runs of several layouts, in a folder each: their metrics, and what their ranks found.

    Args:
        folder: of all of them.
        always: overrides of every run.
    """

    def __init__(self, folder: Path, always: Sequence[str]) -> None:
        self._folder, self._always = folder, always
        self.found: dict[str, Ranks] = {}

    def launch(self, jobs: Mapping[int, Jobs], gpus: int = 0) -> None:
        """Run jobs (processes -> name -> overrides) in one start."""
        made = {
            processes: {
                name: [*self._always, f"run_dir={self.path(name)}", *overrides] for name, overrides in named.items()
            }
            for processes, named in jobs.items()
        }
        self.found = launch(self._folder / "launch", made, gpus=gpus)

    def path(self, name: str) -> Path:
        """Folder of a run."""
        return self._folder / name

    def metrics(self, name: str) -> list[Metrics]:
        """Lines of a run."""
        return read_metrics(self.path(name) / "metrics.jsonl")

    def whole(self, name: str, what: str) -> dict[str, Tensor]:
        """Weights at the end, or gradients of the first step, put together from one rank for each share."""
        shares: dict[str, dict[int, tuple[Tensor, Any]]] = {}
        for found in self.found[name]:
            for parameter, share in found[what].items():
                shares.setdefault(parameter, {}).setdefault(found["tensor_rank"], share)
        return {parameter: joined([by_rank[rank] for rank in sorted(by_rank)]) for parameter, by_rank in shares.items()}


def joined(shares: list[tuple[Tensor, Any]]) -> Tensor:
    """A parameter from the shares of all tensor-parallel ranks."""
    first, cut = shares[0]
    if cut is None:
        return first
    dim, sizes = cut
    parts = [share.split(sizes, dim) for share, _ in shares]
    return torch.cat([piece for pieces in zip(*parts, strict=True) for piece in pieces], dim)


def holders(ranks: Ranks) -> Iterator[tuple[str, list[Tensor]]]:
    """Each parameter with every copy of the same share of it."""
    copies: dict[tuple[str, int], list[Tensor]] = {}
    for found in ranks:
        for name, (share, cut) in found["weights"].items():
            copies.setdefault((name, found["tensor_rank"] if cut else -1), []).append(share)
    return ((name, shares) for (name, _), shares in copies.items())
