"""What a person sees: lines on a log, or one moving bar with the time left on a terminal. No torch here."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from nvfp4_train.lasting import lasting, tell
from nvfp4_train.metrics import Metrics

_RECENT = 50  # steps whose mean duration gives the time left
_WAITED = 0.1  # share of a step from which on it says that it waited for its batch


class Console:
    """Prints on the main rank and nowhere else. Where it can't any more, the run goes on all the same.

    Args:
        is_main: False makes every method silent.
        steps: of the whole run.
        stream: where to; a terminal gets the moving bar.
    """

    def __init__(self, is_main: bool, steps: int, stream: TextIO | None = None) -> None:
        self._stream = lasting(stream or sys.stdout, _lost)
        self._is_main = is_main
        self._steps = steps
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._progress: Progress | None = None

    @contextmanager
    def running(self, step: int) -> Iterator[None]:
        """Shows the bar from `step` on, where there is a terminal."""
        if not (self._is_main and self._stream.isatty()):
            yield
            return
        columns = (
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:.1f}%  {task.description}"),
        )
        with Progress(*columns, console=RichConsole(file=self._stream)) as self._progress:
            self._progress.add_task("", total=self._steps, completed=step)
            yield
        self._progress = None

    def say(self, text: str) -> None:
        """Print `text`, above the bar where there is one."""
        if not self._is_main:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def warn(self, text: str) -> None:
        """Print a line that starts with `warning: `."""
        self.say(f"warning: {text}")

    def step(self, metrics: Metrics) -> None:
        """One line for a finished step, or the bar moved to it. Needs step, train/loss, optim/lr and time/step_s."""
        if not self._is_main:
            return
        self._durations.append(metrics["time/step_s"])
        text = step_text(metrics, self._time_left(metrics["step"]))
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=metrics["step"], description=text)
        else:
            done = metrics["step"] / self._steps
            self.say(f"step {metrics['step']:>{len(str(self._steps))}}/{self._steps} {done:6.1%}  {text}")

    def _time_left(self, step: int) -> str:
        seconds = sum(self._durations) / len(self._durations) * (self._steps - step)
        return str(timedelta(seconds=round(seconds)))


def table_console() -> RichConsole:
    """For tables and what is said of them: as wide as the terminal, else wide enough for our widest table."""
    return RichConsole(highlight=False, width=None if sys.stdout.isatty() else 140, file=lasting(sys.stdout))


def _lost(error: OSError) -> None:
    tell(f"warning: nothing can be shown any more ({error.strerror}); the run goes on, its metrics are in its folder")


def step_text(metrics: Metrics, time_left: str) -> str:
    """`loss 2.3456  lr 1.00e-03  grad 0.532  12,345 tok/s  ETA 0:03:12`."""
    parts = [f"loss {metrics['train/loss']:.4f}", f"lr {metrics['optim/lr']:.2e}"]
    if "optim/grad_norm" in metrics:
        parts.append(f"grad {metrics['optim/grad_norm']:.3f}")
    if "throughput/tokens_per_s" in metrics:
        parts.append(f"{metrics['throughput/tokens_per_s']:,.0f} tok/s")
    if "throughput/mfu" in metrics:
        weighted = metrics["throughput/mfu_weighted"]
        parts.append(f"MFU {metrics['throughput/mfu']:.1%} ({weighted:.1%} of the formats' peak)")
    waited = metrics.get("time/data_s", 0.0)
    if waited > _WAITED * metrics["time/step_s"]:
        parts.append(f"waited {f'{waited:.1f} s' if waited >= 1 else f'{1e3 * waited:.0f} ms'} for data")
    return "  ".join([*parts, f"ETA {time_left}"])
