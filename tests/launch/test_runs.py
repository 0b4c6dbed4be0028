"""Real runs of two processes: plain torchrun, a crash with a restart, Slurm's script on two nodes of one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nvfp4_train.checkpoint_files import saved_steps
from nvfp4_train.exits import ExitCode
from nvfp4_train.run_records import load_config
from tests.launch.conftest import STEPS, Overrides, launcher, lines_of, start, wait_until
from tests.trainer.test_resume import assert_same_run

pytestmark = pytest.mark.slow
STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture(scope="module")
def whole(overrides: Overrides, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts, under plain torchrun."""
    folder = tmp_path_factory.mktemp("whole")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = folder / "out"
    process = start([*torchrun, "-m", "nvfp4_train.train", *overrides(folder / "run")], output)
    assert process.wait(timeout=600) == 0, output.read_text()
    return folder / "run"


def assert_equal_to(whole: Path, run: Path, starts: list[tuple[str, int]]) -> None:
    """The same losses, norms, data, weights and moments, bit for bit, after starts with these decisions and steps."""
    one, other = load_config(whole), load_config(run)
    assert_same_run(one, replace(other, run_dir=str(run)), STEPS)
    found = json.loads((run / "environment.json").read_text())["starts"]
    assert [(entry["decision"], entry["step"]) for entry in found] == starts
    assert {entry["world_size"] for entry in found} == {2}


def newest(run: Path) -> int:
    return saved_steps(run / "checkpoints")[-1]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_process_is_started_again_and_goes_on(
    whole: Path, overrides: Overrides, tmp_path: Path, single_process: None
) -> None:
    run, output = tmp_path / "run", tmp_path / "out"
    process = start(launcher("--processes", "2", "--restarts", "2", "--", *overrides(run)), output)
    wait_until(lambda: lines_of(run / "metrics.jsonl") >= 12, process, output)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    assert process.wait(timeout=600) == ExitCode.DONE, output.read_text()
    said = output.read_text()
    assert "rank 1 on" in said
    assert "was killed by SIGKILL; restart 1 of 2 goes on from the last checkpoint" in said
    starts = [("fresh", 0), ("resume", json.loads((run / "environment.json").read_text())["starts"][1]["step"])]
    assert starts[1][1] in (10, 20)
    assert_equal_to(whole, run, starts)


def test_slurm_signals_saves_requeues_and_resumes(
    whole: Path, overrides: Overrides, tmp_path: Path, single_process: None
) -> None:
    run, output = tmp_path / "run", tmp_path / "job.out"
    variables = {"PATH": f"{STAND_INS}:{os.environ['PATH']}", "SLURM_STAND_IN": str(tmp_path)}
    script = ["launch/slurm.sbatch", "--processes", "1", "--", *overrides(run)]
    process = start(["sbatch", *script], tmp_path / "sbatch.out", **variables)
    wait_until(lambda: lines_of(run / "metrics.jsonl") >= 3, process, output)
    os.kill(int((tmp_path / "batch").read_text()), signal.SIGUSR1)
    assert process.wait(timeout=600) == ExitCode.DONE, output.read_text()

    said = output.read_text()
    assert (tmp_path / "codes").read_text().split() == ["75", "0"]
    first, second = said.index("job 4711, start 1, on localhost"), said.index("job 4711, start 2, on localhost")
    assert first < said.index("saved before the time limit; the job goes back into the queue") < second
    assert said.count("USR1: asking the processes of this node to save and leave") == 2
    assert "again: leaving at once" not in said
    step = json.loads((run / "environment.json").read_text())["starts"][1]["step"]
    assert f"interrupted after step {step}, which is saved" in said
    assert f"continues from step {step}" in said[second:]
    assert_equal_to(whole, run, [("fresh", 0), ("resume", step)])
    assert [path.name for path in tmp_path.iterdir() if (path / "metrics.jsonl").exists()] == ["run"]


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    """It ends before torch is imported, so this is cheap."""
    output = tmp_path / "out"
    process = start(launcher("--processes", "2", "--restarts", "3", "--", "data.pth=x"), output)
    assert process.wait(timeout=300) == ExitCode.MISTAKE
    said = output.read_text()
    assert "data.pth: there is no such key" in said
    assert said.splitlines()[-1].endswith("ended with exit code 2 (mistake)")
    assert "restart" not in said


def test_all_nodes_end_with_the_code_of_the_one_that_failed(tmp_path: Path) -> None:
    """Node 1 has another command line, with a mistake in it; node 0 would wait for its processes."""
    outputs = [tmp_path / "0", tmp_path / "1"]
    where = ["--nodes", "2", "--head", f"localhost:{free_port()}", "--processes", "1"]
    good = ["stop_after=1", f"run_dir={tmp_path / 'run'}"]
    commands = [
        launcher(*where, "--node-rank", "0", "--", *good),
        launcher(*where, "--node-rank", "1", "--", "steps=x"),
    ]
    nodes = [start(command, output) for command, output in zip(commands, outputs, strict=True)]
    assert [node.wait(timeout=300) for node in nodes] == [ExitCode.MISTAKE] * 2
    assert "node 1 (" in outputs[0].read_text()
    assert "ended the run with exit code 2; its own output says why" in outputs[0].read_text()


def free_port() -> int:
    return int(
        subprocess.check_output(
            [sys.executable, "-c", "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1])"]
        )
    )
