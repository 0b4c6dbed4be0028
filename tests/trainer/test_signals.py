"""The first signal asks, the second leaves at once; in set-up the first leaves in an orderly way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nvfp4_train.exits import ExitCode
from nvfp4_train.signals import StopSignals, leave_at_once


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_asks(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with StopSignals() as signals:
        signals.finish_steps = True
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number.name
    assert signal.getsignal(number) is before
    assert number.name in capfd.readouterr().err


def test_before_the_first_step_it_interrupts() -> None:
    with StopSignals(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_signal_does_not_hide_the_error_that_ends_the_run(
    asked_before: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with StopSignals() as signals:
        if asked_before:
            signals.finish_steps = True
            os.kill(os.getpid(), signal.SIGINT)
        capfd.readouterr()
        signals.leaving = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == ("SIGINT" if asked_before else "SIGTERM")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("state", ["finish_steps", "leaving"])
def test_the_second_signal_leaves_at_once(state: str) -> None:
    program = (
        "import os, signal\nfrom nvfp4_train.signals import StopSignals\n"
        f"with StopSignals() as signals:\n    signals.{state} = True\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    os.kill(os.getpid(), signal.SIGINT)\n    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.INTERRUPTED
    assert "still here" not in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_imports_leaves_with_one_line(number: signal.Signals) -> None:
    """It strikes within the import of the command line's modules, long before torch's."""
    program = (
        "import os, sys\n"
        "class Strike:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'nvfp4_train.cli':\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "from nvfp4_train.train import main\n"
        "sys.meta_path.insert(0, Strike())\n"
        "main(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.INTERRUPTED
    assert done.stderr == f"{number.name}: interrupted, with no step under way\n"
    assert done.stdout == ""


def test_former_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with leave_at_once():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
