"""One rank of two does something wrong: all end soon, with its error last and its exit code; and two runs of
`make faults`. All launches are made by one process, which forks them (`scenarios`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from nvfp4_train.exits import ExitCode
from tests.faults.plan import SEEDS
from tests.launch.conftest import ROOT

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Played:
    """What became of a scenario: lines printed, exit code, seconds, ranks that are still there."""

    lines: list[str]
    code: int
    seconds: float
    left: list[int]
    folder: Path


class Theatre:
    """All scenarios, played once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-W", "ignore", "-m", "tests.faults.scenarios", str(folder)]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **threads}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.printed = done.stdout

    def __getitem__(self, name: str) -> Played:
        folder = self.folder / name
        lines = [line for line in (folder / "out").read_text().splitlines() if line]
        return Played(lines, **json.loads((folder / "end.json").read_text()), folder=folder)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Theatre:
    return Theatre(tmp_path_factory.mktemp("scenarios"))


def rank_lines(found: Played, rank: int) -> list[str]:
    return [line for line in found.lines if line.startswith(f"[rank {rank} on ")]


@pytest.mark.parametrize(
    ("name", "rank", "phase"),
    [
        ("start", 1, "start"),
        ("start and signal", 1, "start"),
        ("start and slow", 1, "start"),
        ("load", 1, "start"),
        ("data", 1, "data of step 2"),
        ("forward", 1, "forward of step 2"),
        ("backward", 1, "backward of step 2"),
        ("update", 0, "update of step 2"),
        ("evaluation", 1, "evaluation after step 2"),
        ("save", 1, "save after step 1"),
        ("save on rank 0", 0, "save after step 1"),
    ],
)
def test_an_exception_in_a_phase_ends_all(played: Theatre, name: str, rank: int, phase: str) -> None:
    found = played[name]
    assert (found.code, found.left) == (ExitCode.INTERNAL, [])
    assert found.seconds < 30
    (failed,), (waited,) = rank_lines(found, rank), rank_lines(found, 1 - rank)
    assert failed.endswith(f", in {phase}] failed: ValueError: boom")
    assert f"waited for rank {rank} on " in waited
    assert waited.endswith(f", which failed in {phase}: ValueError: boom")
    assert found.lines[-1].startswith(f"launch: rank {rank} on ")
    assert found.lines[-1].endswith(f" ended with exit code 1 (internal), in {phase}: failed: ValueError: boom")
    assert sum(line.startswith("Traceback") for line in found.lines) == 1
    assert not any("gloo" in line for line in found.lines)


def test_an_exception_before_ranks_have_met(played: Theatre) -> None:
    found = played["before start"]
    assert (found.code, found.left) == (ExitCode.INTERNAL, [])
    assert found.lines[-1].endswith(" ended with exit code 1 (internal), in start: failed: ValueError: boom")


def test_a_mistake_of_one_rank(played: Theatre) -> None:
    found = played["a mistake"]
    assert (found.code, found.left) == (ExitCode.MISTAKE, [])
    assert "Traceback" not in "".join(found.lines)
    assert "which found a mistake in data of step 2: no such text" in rank_lines(found, 0)[0]
    assert found.lines[-1].endswith(" ended with exit code 2 (mistake), in data of step 2: error: no such text")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("configuration", "config.optimizer.lr (0.5 there, 0.003 on rank 0)"),
        ("version", "versions.torch (2.12.0 there, 2.1"),
        ("code", "code (other there, "),
        ("environment", "environment.NVTE_FUSED (1 there, None on rank 0)"),
        ("corpus", "data.source data"),
    ],
)
def test_a_rank_that_is_started_otherwise_is_named_with_the_key(played: Theatre, name: str, key: str) -> None:
    found = played[name]
    assert (found.code, found.left) == (ExitCode.MISTAKE, [])
    said = f"error: rank 1 was started with another value of {key}"
    assert any(said in line for line in found.lines[:-1])
    assert found.lines[-1].startswith("launch: rank ")
    assert said in found.lines[-1]
    assert not list((found.folder / "run").glob("checkpoints/*"))


@pytest.mark.parametrize(("name", "rank"), [("stopped", 1), ("rank 0 stopped", 0)])
def test_a_rank_that_hangs_is_given_up(played: Theatre, name: str, rank: int) -> None:
    found = played[name]
    assert (found.code, found.left) == (ExitCode.INTERNAL, [])
    assert found.seconds < 30
    said = "which has shown no sign of life for 6 s (parallel.timeout); last heard of in "
    (waited,) = rank_lines(found, 1 - rank)
    assert f"in backward of step 2] waited for rank {rank} on " in waited
    assert said in waited
    assert said in found.lines[-1]
    assert "Traceback" not in "".join(found.lines)


def test_a_rank_that_hangs_when_all_is_done_is_ended(played: Theatre) -> None:
    """The watch is over then. The run is saved, and says so when it is started again."""
    found = played["stopped when all is done"]
    assert (found.code, found.left) == (ExitCode.INTERNAL, [])
    assert found.seconds < 30
    assert "launch: some processes are still there 2 s after others were done; they are ended" in found.lines
    assert found.lines[-1].endswith(" was killed by SIGKILL")
    assert (found.folder / "run" / "checkpoints" / "latest").read_text() == "step-00000004\n"


def test_a_rank_that_is_killed(played: Theatre) -> None:
    found = played["killed"]
    assert (found.code, found.left) == (ExitCode.INTERNAL, [])
    assert "waited for rank 1 on " in rank_lines(found, 0)[0]
    assert "which is gone, killed or lost with its machine; last heard of in " in rank_lines(found, 0)[0]
    assert found.lines[-1].startswith("launch: rank 1 on ")
    assert found.lines[-1].endswith(" was killed by SIGKILL")
    assert "Traceback" not in "".join(found.lines)


@pytest.mark.parametrize("name", ["interrupted at start", "interrupted in preparation"])
def test_a_signal_to_one_rank_at_the_start_interrupts_all(played: Theatre, name: str) -> None:
    found = played[name]
    assert (found.code, found.left) == (ExitCode.INTERRUPTED, [])
    assert rank_lines(found, 1)[0].endswith("interrupted before there was anything to save")


@pytest.mark.parametrize(("name", "step"), [("interrupted in a step", 3), ("interrupted in evaluation", 2)])
def test_a_signal_to_one_rank_lets_all_finish_the_step_and_save_once(played: Theatre, name: str, step: int) -> None:
    found = played[name]
    assert (found.code, found.left) == (ExitCode.INTERRUPTED, [])
    assert f"interrupted after step {step}, which is saved; the same command goes on from there" in found.lines
    assert (found.folder / "run" / "checkpoints" / "latest").read_text() == f"step-{step:08d}\n"
    for what in ("requested", "durable"):
        assert sum(line.startswith(f"checkpoint step-{step:08d}: {what}") for line in found.lines) == 1
    assert not any(f"step-{step + 1:08d}" in line for line in found.lines)


def test_a_bad_gradient_on_one_rank_is_found_there_and_never_saved(played: Theatre) -> None:
    """All agree to skip; after `optimizer.max_skipped` steps all end with code 4."""
    found = played["nan"]
    assert (found.code, found.left) == (ExitCode.NON_FINITE, [])
    bad = "first bad on rank 1: gradient of decoder.layers.1.pre_mlp_layernorm.weight"
    skipped = [line for line in found.lines if line.startswith("warning: step ")]
    assert [line.partition(" skipped")[0] for line in skipped] == ["warning: step 2", "warning: step 3"]
    assert all(line.endswith(bad) for line in skipped)
    assert any(line.startswith("stopped at step 3: 2 skipped in a row") for line in found.lines)
    saved = sorted(path.name for path in (found.folder / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_is_hit_ends_the_same(played: Theatre, seed: int) -> None:
    """Two seeds of `make faults`."""
    result = json.loads((played.folder / f"seed-{seed}.json").read_text())
    assert result["verdict"] == "same", result
    assert all(result["struck"]), result


def test_a_signal_in_a_save_lets_it_end_and_a_second_one_abandons_it(played: Theatre) -> None:
    """SIGTERM once while rank 1 writes step 3, then twice while it writes step 6; then the run goes on to its end."""
    result = json.loads((played.folder / "terminated.json").read_text())
    assert result["codes"] == [ExitCode.INTERRUPTED, ExitCode.INTERRUPTED, ExitCode.DONE]
    once, twice, done = result["left"]
    assert once[:2] == ["latest", "step-00000003"]
    assert len(once) <= 3, "at most a checkpoint of the step that was under way"
    assert not any(name.endswith(".tmp") for name in once)
    asked = result["printed"].index("SIGTERM: finishing this step, then saving; once more leaves at once")
    (durable,) = [number for number, line in enumerate(result["printed"]) if "step-00000003: durable" in line]
    assert asked < durable
    (unfinished,) = set(twice) - set(once)
    assert unfinished.startswith("step-00000006.")
    assert unfinished.endswith(".tmp")
    assert not any(name.endswith(".tmp") for name in done)
    assert result["verdict"] == "same"
