"""Real runs of two processes: plain torchrun, a crash with a restart, Slurm's script on two nodes of one machine; and
starts that can't be.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nvfp4_train.checkpoints.files import LATEST
from nvfp4_train.exits import ExitCode
from nvfp4_train.run_records import load_config
from tests.launch.conftest import ROOT, STEPS, Overrides, free_port, launcher, lines_of, start, wait_until
from tests.trainer.test_resume import assert_same_run

pytestmark = pytest.mark.slow
STAND_INS = Path(__file__).parent / "stand_ins"
ENTERING = """
import os, time
if "RANK" in os.environ:
    from nvfp4_train import phase
    real = phase.enter
    def enter(name):
        real(name)
{act}
    phase.enter = enter
"""
# Once, in a step after a checkpoint is there.
KILLED = """
        if name.startswith("forward") and os.path.exists({latest!r}) and not os.path.exists({struck!r}):
            open({struck!r}, "w").close()
            os.kill(os.getpid(), 9)
"""
HELD = """
        while name == "data of step 5" and not os.path.exists({free!r}):
            time.sleep(0.01)
"""


def entering(folder: Path, act: str, **names: Path) -> dict[str, str]:
    """The variable that has a run's processes act when they enter a phase; `names` are those of files in `act`."""
    folder.mkdir()
    text = ENTERING.format(act=act.format(**{name: str(path) for name, path in names.items()}))
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


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


def test_a_killed_process_is_started_again_and_goes_on(
    whole: Path, overrides: Overrides, tmp_path: Path, single_process: None
) -> None:
    """On two nodes: the one whose process was killed calls, the other one joins."""
    run, outputs = tmp_path / "run", [tmp_path / "0", tmp_path / "1"]
    where = ["--nodes", "2", "--head", f"localhost:{free_port()}", "--processes", "1", "--restarts", "2"]
    killed = entering(tmp_path / "1 is", KILLED, latest=run / "checkpoints" / LATEST, struck=tmp_path / "struck")
    nodes = [
        start(launcher(*where, "--node-rank", str(rank), "--", *overrides(run)), output, **variables)
        for rank, (output, variables) in enumerate(zip(outputs, ({}, killed), strict=True))
    ]
    for process, output in zip(nodes, outputs, strict=True):
        assert process.wait(timeout=600) == ExitCode.DONE, output.read_text()
    said = outputs[1].read_text()
    assert "restart 1 of 2 goes on from the last checkpoint: rank 1 on" in said
    assert "was killed by SIGKILL" in said
    step = json.loads((run / "environment.json").read_text())["starts"][1]["step"]
    assert step in (10, 20)
    assert_equal_to(whole, run, [("fresh", 0), ("resume", step)])


def test_slurm_signals_saves_requeues_and_resumes(
    whole: Path, overrides: Overrides, tmp_path: Path, single_process: None
) -> None:
    run, output = tmp_path / "run", tmp_path / "job.out"
    variables = {"PATH": f"{STAND_INS}:{os.environ['PATH']}", "SLURM_STAND_IN": str(tmp_path)}
    variables |= entering(tmp_path / "held", HELD, free=tmp_path / "free")
    script = ["launch/slurm.sbatch", "--processes", "1", "--", *overrides(run)]
    process = start(["sbatch", *script], tmp_path / "sbatch.out", **variables)
    wait_until(lambda: lines_of(run / "metrics.jsonl") == 4, process, output)
    os.kill(int((tmp_path / "batch").read_text()), signal.SIGUSR1)
    wait_until(lambda: output.read_text().count("SIGTERM: finishing this step") == 2, process, output)
    (tmp_path / "free").touch()
    assert process.wait(timeout=600) == ExitCode.DONE, output.read_text()

    said = output.read_text()
    assert (tmp_path / "codes").read_text().split() == ["75", "0"]
    first, second = said.index("job 4711, start 1, on localhost"), said.index("job 4711, start 2, on localhost")
    assert first < said.index("saved before the time limit; the job goes back into the queue") < second
    assert said.count("USR1: asking the processes of this node to save and leave") == 2
    assert "again: leaving at once" not in said
    assert "interrupted after step 5, which is saved" in said
    assert "continues from step 5" in said[second:]
    assert_equal_to(whole, run, [("fresh", 0), ("resume", 5)])
    assert [path.name for path in tmp_path.iterdir() if (path / "metrics.jsonl").exists()] == ["run"]


def test_two_nodes_under_plain_torchrun(
    whole: Path, overrides: Overrides, tmp_path: Path, single_process: None
) -> None:
    run, outputs = tmp_path / "run", [tmp_path / "0", tmp_path / "1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    where = ["--master-addr", "localhost", "--master-port", str(free_port())]
    nodes = [
        start([*torchrun, *where, "--node-rank", str(rank), "-m", "nvfp4_train.train", *overrides(run)], output)
        for rank, output in enumerate(outputs)
    ]
    for process, output in zip(nodes, outputs, strict=True):
        assert process.wait(timeout=600) == ExitCode.DONE, output.read_text()
    assert_equal_to(whole, run, [("fresh", 0)])


def test_a_folder_that_the_nodes_do_not_share(overrides: Overrides, tmp_path: Path) -> None:
    """The same path leads each node to a folder of its own: found at the start, said last on both, nothing left."""
    folders = [tmp_path / "0", tmp_path / "1"]
    where = ["--nodes", "2", "--head", f"localhost:{free_port()}", "--processes", "1"]
    arguments = [*where, "--", *overrides(Path("/proc/self/cwd/run"))]
    nodes = []
    for rank, folder in enumerate(folders):
        folder.mkdir()
        command = launcher("--node-rank", str(rank), *arguments)
        nodes.append(start(command, folder / "out", folder, PYTHONPATH=str(ROOT)))
    for process, folder in zip(nodes, folders, strict=True):
        assert process.wait(timeout=300) == ExitCode.MISTAKE
        last = (folder / "out").read_text().splitlines()[-1]
        assert "run_dir=/proc/self/cwd/run: what rank 0 writes there is not seen on " in last
        assert "give a run_dir on a file system that all nodes share" in last
        assert not (folder / "run").exists()


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    output = tmp_path / "out"
    head = f"localhost:{free_port()}"
    where = ["--nodes", "2", "--node-rank", "0", "--head", head, "--wait", "0.1"]
    assert start(launcher(*where, "--", "steps=1"), output).wait(300) == ExitCode.MISTAKE
    (said,) = output.read_text().splitlines()
    assert said.startswith(f"error: 1 of 2 nodes came to {head} within 0.1 s: node 0 (")
    assert "Missing: node 1." in said


def test_a_port_that_another_program_has(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        where = ["--nodes", "2", "--node-rank", "0", "--head", f"localhost:{port}"]
        assert start(launcher(*where, "--", "steps=1"), output).wait(300) == ExitCode.MISTAKE
    (said,) = output.read_text().splitlines()
    assert said.startswith(f"error: port {port} of this node can't be served")
    assert f"--head localhost:{port + 1}" in said


def test_a_node_without_node_0_says_so_in_a_few_lines(tmp_path: Path) -> None:
    output = tmp_path / "out"
    where = ["--nodes", "2", "--node-rank", "1", "--head", f"localhost:{free_port()}", "--wait", "0.1"]
    assert start(launcher(*where, "--", "steps=1"), output).wait(300) == ExitCode.MISTAKE
    lines = output.read_text().splitlines()
    assert lines[-1].startswith("error: node 0 did not answer at localhost:")
    assert not any("frame #" in line for line in lines)
    assert len(lines) < 5
