"""What the Slurm job hands to `srun`, and what it makes of the exit code. `srun` only writes its arguments down."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.conftest import ROOT

STAND_INS = Path(__file__).parent / "stand_ins"
# The batch script is the parent: `signal` is sent to it while it waits.
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" >"$SLURM_STAND_IN/arguments"
trap 'exit {code}' USR1
{signal}
exit {code}
"""
OUT_OF_TIME = (
    'mkfifo "$SLURM_STAND_IN/pipe"; kill -USR1 $PPID; while :; do read -r -t 0.1 <>"$SLURM_STAND_IN/pipe"; done'
)


# Sourced by the batch script: a signal to it just before one of its commands, once srun listens.
STRUCK = """[[ $0 == */slurm.sbatch ]] || return
struck() {{
    [[ -z "${{strikes:-}}" && "$BASH_COMMAND" == {command} ]] || return 0
    strikes=1
    until [ -e "$SLURM_STAND_IN/listens" ]; do sleep 0.01; done
    kill -{name} $$
    for ((waits = 0; waits < 50; waits++)); do [ -e "$SLURM_STAND_IN/heard" ] || sleep 0.01; done
}}
trap struck DEBUG
"""
COUNTING = """
heard=0
trap 'heard=$((heard + 1)); echo $heard >"$SLURM_STAND_IN/heard"' USR1
touch "$SLURM_STAND_IN/listens"
for ((waits = 0; waits < 3000 && heard == 0; waits++)); do sleep 0.01; done
sleep 0.5
exit {code}
"""


def job(
    folder: Path, *arguments: str, code: int = 0, signal: str = "", struck: str = "", where: Path = ROOT
) -> tuple[int, list[str]]:
    """Exit code of the job and the arguments that `launch.run` got."""
    (folder / "struck").write_text(struck)
    (folder / "srun").write_text(SRUN.format(code=code, signal=signal))
    (folder / "srun").chmod(0o755)
    variables = {
        "PATH": f"{folder}:{STAND_INS}:{os.environ['PATH']}",
        "SLURM_STAND_IN": str(folder),
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "a01,a02,a03",
        "SLURM_SUBMIT_DIR": str(where),
        "BASH_ENV": str(folder / "struck"),
    }
    script = ["bash", str(ROOT / "launch/slurm.sbatch"), *arguments]
    done = subprocess.run(script, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    (folder / "out").write_text(done.stdout + done.stderr)
    written = folder / "arguments"
    words = written.read_text().splitlines() if written.exists() else []
    return done.returncode, words[words.index("launch") + 1 :] if words else []


HEAD = ["--nodes", "3", "--head", "a01:24567"]


@pytest.mark.parametrize(
    ("arguments", "handed_on"),
    [
        ([], ["--", "run_dir=runs/slurm-1234567"]),
        (["--", "experiment=1b"], ["--", "experiment=1b", "run_dir=runs/slurm-1234567"]),
        (["--restarts", "3"], ["--restarts", "3", "--", "run_dir=runs/slurm-1234567"]),
        (["--restarts", "3", "--", "run_dir=/a b", "steps=1"], ["--restarts", "3", "--", "run_dir=/a b", "steps=1"]),
    ],
)
def test_head_node_port_of_the_job_and_one_run_folder(
    arguments: list[str], handed_on: list[str], tmp_path: Path
) -> None:
    assert job(tmp_path, *arguments) == (0, [*HEAD, *handed_on])


def test_out_of_time_and_saved_goes_back_into_the_queue(tmp_path: Path) -> None:
    assert job(tmp_path, code=75, signal=OUT_OF_TIME)[0] == 75
    assert (tmp_path / "requeued").read_text() == "1234567\n"


@pytest.mark.parametrize(
    ("code", "signal"),
    [(0, OUT_OF_TIME), (75, ""), (4, ""), (1, OUT_OF_TIME)],
    ids=["done in time", "stopped by its user", "bad numbers", "not saved"],
)
def test_nothing_else_does(code: int, signal: str, tmp_path: Path) -> None:
    assert job(tmp_path, code=code, signal=signal)[0] == code
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("name", ["USR1", "TERM"])
@pytest.mark.parametrize("command", ["'step=$!'", "'[ -n '*"], ids=["before there is a step", "just afterwards"])
def test_a_signal_around_the_start_of_the_step_is_handed_on_once(command: str, name: str, tmp_path: Path) -> None:
    struck = STRUCK.format(command=command, name=name)
    assert job(tmp_path, code=75, signal=COUNTING.format(code=75), struck=struck)[0] == 75
    assert (tmp_path / "heard").read_text() == "1\n"
    assert (tmp_path / "requeued").exists() == (name == "USR1")


def test_from_another_folder_it_says_where_to_call_it(tmp_path: Path) -> None:
    assert job(tmp_path, where=tmp_path) == (2, [])
    assert "call sbatch from the clone's root" in (tmp_path / "out").read_text()
