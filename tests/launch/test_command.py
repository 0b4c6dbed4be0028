"""The launcher's command line, and whose end counts. No processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from launch.agent import decisive, described, reason
from launch.run import PORT, parse
from nvfp4_train import phase
from nvfp4_train.config import ConfigError
from nvfp4_train.exits import leave_reason


def test_one_node_needs_nothing() -> None:
    options = parse(["--restarts", "3", "--", "experiment=1b", "--config-dir", "mine"])
    assert (options.nodes, options.node_rank, options.host, options.port) == (1, 0, "localhost", 0)
    assert (options.processes, options.restarts, options.wait) == (None, 3, 600.0)
    assert options.overrides == ("experiment=1b", "--config-dir", "mine")


@pytest.mark.parametrize(("head", "host", "port"), [("a01", "a01", PORT), ("a01:1234", "a01", 1234)])
def test_many_nodes(head: str, host: str, port: int) -> None:
    options = parse(["--nodes", "4", "--node-rank", "3", "--head", head, "--", "steps=1"])
    assert (options.nodes, options.node_rank, options.host, options.port) == (4, 3, host, port)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes", "4", "--head", "a01"], "--nodes 4 needs --node-rank and --head on every node"),
        (["--nodes", "4", "--node-rank", "4", "--head", "a01"], "--node-rank 4: with --nodes 4 ranks go from 0 to 3"),
        (["--nodes", "4", "--node-rank", "1", "--head", "a01:x"], "--head a01:x: write HOST or HOST:PORT"),
        (["--nodes", "4", "--node-rank", "1", "--head", "a01:70000"], "with a port from 1 to 65535"),
        (["--head", "a01"], "--node-rank and --head are for several nodes. Give --nodes N too"),
        (["--node-rank", "1"], "--node-rank and --head are for several nodes. Give --nodes N too"),
        (["--nodes", "0"], "--nodes 0: must be 1 or more"),
        (["--restarts", "-1"], "--restarts -1: must be 0 or more"),
        (["--max-restarts", "3"], "unrecognized arguments: --max-restarts"),
        (["steps=1"], "unrecognized arguments: steps=1. Overrides of training go behind --"),
    ],
)
def test_mistakes(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(arguments)
    assert said in str(error.value)


def test_help_imports_no_torch() -> None:
    program = (
        "import sys\nfrom launch.run import main\n"
        "try:\n    main(['--help'])\nfinally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "launch/slurm.sbatch" in done.stdout


@pytest.mark.parametrize(
    ("codes", "counts"),
    [
        ({1: -9, 0: 75}, 1),  # 0 was told to leave because 1 was killed
        ({0: 1, 1: -9}, 0),  # 0 says that 1 was silent, and 1 was killed for it
        ({0: 75, 1: -9}, 0),  # an orderly stop, for which 1 took too long
        ({2: 1, 1: -9}, 1),  # 2 waited for 1
        ({2: 1, 1: 2}, 1),  # 2 lost its peer, which found a mistake
        ({2: 1, 1: 4}, 1),
        ({1: 75, 2: 75}, 1),
        ({3: 1, 0: 1}, 0),  # 0 says why
    ],
)
def test_whose_end_counts(codes: dict[int, int], counts: int) -> None:
    reason = {"message": "in backward of step 3: failed: ValueError: boom", "extraInfo": {"timestamp": "7", "code": 1}}
    says = {0: reason} if codes.get(0) == 1 else {}
    failures = {
        rank: SimpleNamespace(exitcode=code, message=says.get(rank, ""), timestamp=7) for rank, code in codes.items()
    }
    rank, failure = decisive(failures)  # type: ignore[arg-type]
    assert (rank, failure.exitcode) == (counts, codes[counts])
    if says:
        assert described(failure) == "ended with exit code 1 (internal), " + reason["message"]  # type: ignore[operator]


def test_a_reason_is_left_once_where_the_launcher_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "0" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    phase.enter("data of step 3")
    leave_reason("first", 2)
    leave_reason("second", 1)
    failure = ProcessFailure(0, 1, 75, str(file))  # told to leave while it was leaving
    assert described(failure) == "ended with exit code 2 (mistake), in data of step 3: first"
    assert reason(failure) == "in data of step 3: first"
    assert failure.timestamp == pytest.approx(time.time(), abs=60)
    assert reason(ProcessFailure(0, 1, -9, str(tmp_path / "none"))) == ""
