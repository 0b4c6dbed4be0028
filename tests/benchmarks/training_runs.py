"""Training runs as processes of their own, for tables of recipes: started with their output in a log, and recognised
when they are there already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nvfp4_train.comparison.runs import METRICS, config_differences, open_run
from nvfp4_train.compose import compose
from nvfp4_train.schema import to_mapping

ROOT = Path(__file__).parents[2]


class RunFailed(Exception):
    """A training ended with another exit code than 0; `code` is that."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def finished(path: Path, arguments: Sequence[str]) -> bool:
    """Whether the run folder `path` holds the run of these overrides, complete.

    Raises RunFailed where it holds a run of another configuration: going on with that would mix the two.
    """
    if not (path / METRICS).is_file() or not (path / METRICS).stat().st_size:
        return False
    config = compose(arguments)
    run = open_run(path)
    different = config_differences(run, replace(run, config=json.loads(json.dumps(to_mapping(config)))))
    if different:
        raise RunFailed(f"{path} holds a run with another {', '.join(different)}. Delete it, or use --folder.", 2)
    return bool(run.train.steps[-1] >= config.steps)


def start_training(
    path: Path, arguments: Sequence[str], threads: int, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A process that trains one run into `path`, its output in `<path>.log`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "nvfp4_train.train", *arguments]
    variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **(environment or {})}
    with log_of(path).open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=log, stderr=log)


def log_of(path: Path) -> Path:
    """Where the output of the run in `path` goes."""
    return path.with_name(f"{path.name}.log")


def failure(path: Path, code: int) -> RunFailed:
    """What to raise for a run that ended with `code`: the end of its output."""
    tail = log_of(path).read_text().splitlines()[-8:]
    return RunFailed("\n".join([f"{path.name} ended with exit code {code}:", *tail]), code)
