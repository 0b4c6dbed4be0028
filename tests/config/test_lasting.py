"""Output that nobody reads any more: a run goes on without it, and no exit code changes for it."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from nvfp4_train.console import Console
from nvfp4_train.exits import ExitCode, guarded
from nvfp4_train.lasting import lasting
from tests.trainer.test_console import STEP


def ends(body: str, *, stderr: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """`guarded` around `body` in a process whose standard output is a pipe without a reader."""
    read, write = os.pipe()
    os.close(read)
    script = f"import sys\nfrom nvfp4_train.exits import guarded\ndef body():\n    {body}\nsys.exit(guarded(body))"
    try:
        return subprocess.run(
            [sys.executable, "-c", script], stdout=write, stderr=stderr or write, text=True, timeout=60, check=False
        )
    finally:
        os.close(write)


@pytest.mark.parametrize("flush", [True, False])
def test_a_command_whose_output_has_been_seen_is_done_and_says_nothing(flush: bool) -> None:
    done = ends(f"print('text', flush={flush})")
    assert (done.returncode, done.stderr) == (ExitCode.DONE, "")


def test_another_pipe_that_broke_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with open(os.devnull, "w", encoding="utf-8") as stdout, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert guarded(body) == ExitCode.INTERNAL
    assert "failed: BrokenPipeError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("from nvfp4_train.config import ConfigError; raise ConfigError('x')", ExitCode.MISTAKE),
        ("raise KeyboardInterrupt", ExitCode.INTERRUPTED),
        ("raise OSError", ExitCode.INTERNAL),
    ],
)
def test_a_code_stays_what_it_is_where_nothing_can_be_told(body: str, code: ExitCode) -> None:
    assert ends(body, stderr=None).returncode == code


def test_a_run_goes_on_where_nothing_can_be_shown() -> None:
    """As with `train | tee log`, where Ctrl-C ends tee at once and the run has a step to finish and to save."""
    done = ends(
        "from nvfp4_train.console import Console; console = Console(True, 4)\n"
        "    [console.say('x') for _ in range(9)]; return 4"
    )
    assert done.returncode == ExitCode.NON_FINITE
    assert done.stderr == (
        "warning: nothing can be shown any more (Broken pipe); the run goes on, its metrics are in its folder\n"
    )


def test_a_terminal_that_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setenv("TERM", "xterm")
    console = Console(True, 100, Gone())
    with console.running(24):
        console.step(STEP)
        console.say("saved")


def test_what_can_be_written_is_written_until_it_can_not() -> None:
    lost: list[OSError] = []
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        stream = lasting(pipe, lost.append)
        print("one", file=stream, flush=True)
        assert os.read(read, 100) == b"one\n"
        os.close(read)
        for _ in range(3):
            print("two", file=stream, flush=True)
    assert [error.errno for error in lost] == [32]
    print("nothing", file=lasting(None), flush=True)


def test_a_gap_stays_a_gap_for_a_reader_that_leaves() -> None:
    """`compare --max-gap` guards a pipeline; its tables are another matter."""
    done = ends("from nvfp4_train.console import table_console; table_console().print('a table'); return 3")
    assert (done.returncode, done.stderr) == (ExitCode.GAP, "")
