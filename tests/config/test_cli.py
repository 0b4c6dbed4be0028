"""The front door: exit codes, help, several runs, and what is refused there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from data.config import DataError
from models.config import ModelError
from nvfp4_train import cli
from nvfp4_train.checkpoints.files import CheckpointError
from nvfp4_train.compose import compose
from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.exits import ExitCode, guarded
from nvfp4_train.precision.config import PrecisionError
from nvfp4_train.schema import to_yaml


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def run(*argv: str, command: str = "train") -> tuple[int, list[RunConfig]]:
    seen: list[RunConfig] = []
    return cli.run(seen.append, command, argv), seen


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code, seen = run(*argv)
    out, err = capsys.readouterr()
    assert (code, seen, out) == (2, [], "")
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err


def test_exit_codes_are_stable() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "INTERNAL": 1,
        "MISTAKE": 2,
        "GAP": 3,
        "NON_FINITE": 4,
        "INTERRUPTED": 75,
    }


def test_the_readme_table_holds_every_exit_code() -> None:
    readme = (Path(cli.__file__).parent / "README.md").read_text()
    for code in ExitCode:
        assert f"| {int(code)} |" in readme


@pytest.mark.parametrize("kind", [ConfigError, ModelError, DataError, PrecisionError, CheckpointError])
def test_a_users_mistake_is_one_message(kind: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise kind("x is wrong: write y")

    assert guarded(body) == ExitCode.MISTAKE
    assert capsys.readouterr().err == "error: x is wrong: write y\n"


def test_an_error_of_ours_has_a_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        raise ValueError("surprise")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert guarded(body) == ExitCode.INTERNAL
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("[rank 1 on ")
    assert lines[-1].endswith("failed: ValueError: surprise")


def test_exit_codes_of_bodies() -> None:
    assert guarded(lambda: None) == 0
    assert guarded(lambda: ExitCode.GAP) == 3

    def interrupted() -> None:
        raise KeyboardInterrupt

    assert guarded(interrupted) == ExitCode.INTERRUPTED


def test_no_command_ends_of_a_letter_that_a_terminal_lacks() -> None:
    code = "import sys; from nvfp4_train.exits import guarded; sys.exit(guarded(lambda: print('läuft → hier')))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "l\\xe4uft \\u2192 hier\n", "")


def test_the_body_gets_the_configuration(tmp_path: Path) -> None:
    code, seen = run("steps=7", "precision=fp8_block", "run_dir=here")
    assert code == 0
    assert seen == [compose(["steps=7", "precision=fp8_block", "run_dir=here"])]
    assert list(tmp_path.iterdir()) == [], "nothing of Hydra's is left behind"


def test_cfg_job_prints_what_would_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = run("steps=1e3", "--cfg", "job", "data.path=x.txt", "--resolve")
    printed = capsys.readouterr().out
    assert (code, seen) == (0, [])
    assert printed == to_yaml(compose(["steps=1000", "data.path=x.txt"]))
    assert yaml.safe_load(printed)["data"]["path"] == os.path.abspath("x.txt")


def test_options_may_stand_anywhere(tmp_path: Path) -> None:
    (tmp_path / "mine" / "schedule").mkdir(parents=True)
    (tmp_path / "mine" / "schedule" / "short.yaml").write_text("warmup: 1\ndecay: 2\n")
    code, seen = run("steps=9", "--config-dir", "mine", "schedule=short", "seed=4")
    assert code == 0
    assert (seen[0].schedule.warmup, seen[0].seed) == (1, 4)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--local_rank=0"], ["--local_rank=0", "torchrun --nproc-per-node N -m nvfp4_train.train"]),
        (["--local-rank=3", "steps=2"], ["torchrun"]),
        (["--local_rank", "0"], ["torchrun"]),
        (["--nproc_per_node=2"], ["torchrun"]),
        (["--lr", "3"], ["--lr", "optimizer.lr=VALUE"]),
        (["--steps=3"], ["--steps=3", "steps=3"]),
        (["--zzz"], ["--zzz", "--help"]),
        (["--cfg", "hydra"], ["--cfg job"]),
        (["--cfg"], ["--cfg"]),
        (["--config-dir", "nowhere"], ["nowhere", "no such folder"]),
        (["steps"], ["key=value"]),
        (["stepss=3"], ["Did you mean steps?"]),
        (["data.path=${data.pth}"], ["data.path", "${data.pth}"]),
        (["data.global_batch=10", "data.micro_batch=4"], ["10", "4", "8 or 12"]),
        (["model.pattern=M-E"], ["'E'", "mixture-of-experts"]),
        (["parallel.expert=2"], ["parallel.expert=2", "parallel.expert=1"]),
        (["precision.bf16_blocks.first=6", "precision.bf16_blocks.last=6"], ["6 + 6", "10"]),
        (["steps=200", "precision.phases=[{start: 900, forward: bf16}]"], ["precision.phases[0]", "900", "199"]),
        (["steps=200", "schedule.warmup=150", "schedule.decay=100"], ["150", "100", "steps=200"]),
        (["baseline=nowhere"], ["nowhere", "metrics.jsonl"]),
        (["--multirun", "seed=1,2", "run_dir=same"], ["same", "share one folder"]),
        (["--multirun", "seed=1,2", "stepss=3"], ["Did you mean steps?"]),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]) -> None:
    message = refused(capsys, *argv)
    for word in words:
        assert word in message


def test_multirun_under_torchrun_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, seen = run("--multirun", "seed=1,2")
    assert (code, seen) == (2, [])
    assert "for seed in 1 2; do torchrun" in capsys.readouterr().err


def test_the_flags_of_plan() -> None:
    assert cli.parse_arguments("plan", ["--json", "seed=2"]).flags == {"json"}
    with pytest.raises(ConfigError, match="--json"):
        cli.parse_arguments("train", ["--json"])


@pytest.mark.parametrize("command", ["train", "prepare", "plan", "doctor", "compare", "evaluate"])
def test_help_is_quick_and_needs_no_torch(command: str) -> None:
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['nvfp4_train.{command}', '--help']\n"
        "try:\n"
        f"    runpy.run_module('nvfp4_train.{command}', run_name='__main__')\n"
        "finally:\n"
        "    print([name for name in ('torch', 'megatron', 'wandb', 'datasets') if name in sys.modules])\n"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 10, "about a second, whoever else is at work"


def test_help_names_groups_choices_and_keys() -> None:
    text = cli.help_text("train")
    for word in ("nemotron_nano_12b_v2", "fp8_block", "optimizer.lr=X", "--multirun", "--cfg job", "--config-dir"):
        assert word in text


def test_multirun_starts_a_process_for_each_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []

    def record(command: list[str]) -> int:
        started.append(command)
        return 4 if "seed=2" in command else 0

    monkeypatch.setattr(cli, "_run_child", record)
    (tmp_path / "mine").mkdir()
    code, seen = run("-m", "seed=1,2,3", "steps=9", "--config-dir", "mine", "run_dir=r/${seed}")
    assert (code, seen) == (4, []), "the first code that is not 0, and the others still ran"
    assert started == [
        [
            sys.executable,
            "-m",
            "nvfp4_train.train",
            f"seed={seed}",
            "steps=9",
            "run_dir=r/${seed}",
            "--config-dir",
            "mine",
        ]
        for seed in (1, 2, 3)
    ]


def test_multirun_stops_where_it_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([0, ExitCode.INTERRUPTED, 0])
    monkeypatch.setattr(cli, "_run_child", lambda command: next(codes))
    assert run("-m", "seed=1,2,3")[0] == ExitCode.INTERRUPTED
    assert next(codes) == 0


def test_multirun_runs_real_processes_and_reports_each(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.run(lambda config: None, "prepare", ["--multirun", "data.path=nowhere1.jsonl,nowhere2.jsonl"])
    err = capsys.readouterr().err
    assert code == ExitCode.MISTAKE
    assert "run 1 of 2: exit code 2" in err
    assert "run 2 of 2: exit code 2" in err


def test_a_child_gets_the_signal_and_its_code_is_handed_on() -> None:
    child = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nprint(1, flush=True)\n"
        "time.sleep(600)"
    )
    parent = (
        f"import sys; from nvfp4_train.cli import _run_child; sys.exit(_run_child([sys.executable, '-c', {child!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == ExitCode.INTERRUPTED
    process.stdout.close()


def test_a_signal_at_the_moment_a_child_is_started_reaches_it() -> None:
    """Which may not have come as far as to listen."""
    parent = (
        "import os, signal, subprocess, sys\nfrom nvfp4_train.cli import _run_child\n"
        "class Struck(subprocess.Popen):\n    def __init__(self, *arguments):\n        super().__init__(*arguments)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "subprocess.Popen = Struck\nsys.exit(_run_child([sys.executable, '-c', 'import time; time.sleep(600)']))"
    )
    done = subprocess.run([sys.executable, "-c", parent], timeout=120)
    assert done.returncode == ExitCode.INTERRUPTED
