"""What the console prints, off a terminal and on one."""

from __future__ import annotations

import io

from nvfp4_train.console import Console

STEP = {
    "step": 25,
    "train/loss": 2.34567,
    "optim/lr": 1e-3,
    "optim/grad_norm": 0.5321,
    "throughput/tokens_per_s": 12345.6,
    "time/step_s": 2.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_line_a_step_off_a_terminal() -> None:
    stream = io.StringIO()
    console = Console(True, 100, stream)
    with console.running(24):
        console.step(STEP)
    assert stream.getvalue() == (
        "step  25/100  25.0%  loss 2.3457  lr 1.00e-03  grad 0.532  12,346 tok/s  ETA 0:02:30\n"
    )


def test_a_step_that_waits_for_its_batch_says_so() -> None:
    stream = io.StringIO()
    console = Console(True, 100, stream)
    for waited in (0.19, 0.21, 86.24):
        console.step({**STEP, "time/data_s": waited})
    short, long, longest = stream.getvalue().splitlines()
    assert "waited" not in short
    assert long.endswith("12,346 tok/s  waited 210 ms for data  ETA 0:02:30")
    assert longest.endswith("12,346 tok/s  waited 86.2 s for data  ETA 0:02:30")


def test_a_bar_with_the_time_left_on_a_terminal(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    console = Console(True, 100, stream)
    with console.running(24):
        console.say("[saved] step 25")
        console.step(STEP)
    text = stream.getvalue()
    assert "[saved] step 25" in text
    assert "25/100" in text
    assert "25.0%" in text
    assert "loss 2.3457" in text
    assert "ETA 0:02:30" in text


def test_other_ranks_are_silent() -> None:
    stream = io.StringIO()
    console = Console(False, 100, stream)
    with console.running(0):
        console.say("x")
        console.warn("x")
        console.step(STEP)
    assert stream.getvalue() == ""
