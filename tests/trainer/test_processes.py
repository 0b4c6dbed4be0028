"""Runs in processes of their own: killed without a word, and told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvfp4_train.checkpoint_files import LATEST, saved_steps
from nvfp4_train.exits import ExitCode
from nvfp4_train.schema import to_yaml
from nvfp4_train.trainer import train
from tests.trainer.conftest import Make
from tests.trainer.test_resume import assert_same_run

PROGRAM = """
import sys, yaml, torch
from nvfp4_train.config import RunConfig
from nvfp4_train.exits import guarded
from nvfp4_train.schema import from_mapping
from nvfp4_train.train import body
if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(guarded(lambda: body(from_mapping(RunConfig, yaml.safe_load(sys.stdin.read())))))
"""


def start(config_text: str) -> subprocess.Popen[str]:
    """A process without a terminal and without torchrun's variables that trains what `config_text` says."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
    )
    assert process.stdin is not None
    process.stdin.write(config_text)
    process.stdin.close()
    return process


def wait_for(process: subprocess.Popen[str], file: Path) -> None:
    deadline = time.monotonic() + 180
    while not file.exists():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_and_stopped_on_the_way_a_run_ends_the_same(make: Make) -> None:
    overrides = ("steps=12", "checkpoint.every=3", "checkpoint.keep=0")
    whole, parts = make("nvfp4", *overrides, run="whole"), make("nvfp4", *overrides, run="parts")
    assert train(whole) == ExitCode.DONE
    folder = Path(str(parts.run_dir))

    process = start(to_yaml(parts))
    wait_for(process, folder / "checkpoints" / LATEST)
    process.kill()
    process.wait()
    assert saved_steps(folder / "checkpoints")[:1] == [3]

    process = start(to_yaml(parts))
    before = len((folder / "metrics.jsonl").read_text().splitlines())
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    code = process.wait()
    assert code == ExitCode.INTERRUPTED, rest
    assert "SIGTERM: finishing this step" in rest
    last = saved_steps(folder / "checkpoints")[-1]
    assert f"interrupted after step {last}, which is saved" in rest
    assert before <= 12 > last
    assert train(parts) == ExitCode.DONE
    assert_same_run(whole, parts, 12)
