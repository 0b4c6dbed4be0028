"""`debug.profile`: a few steps recorded by torch's profiler into the run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WARM_UP = 2  # steps before recording: the first ones allocate and compile


@contextmanager
def profiler(steps: int, folder: Path) -> Iterator[Callable[[], None]]:
    """Records `steps` steps after the first two into `folder/profile.json` (for Perfetto); 0 records nothing.

    Yields:
        What to call after each step.
    """
    if steps == 0:
        yield lambda: None
        return

    def export(finished: Any) -> None:
        finished.export_chrome_trace(str(folder / "profile.json"))

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    plan = schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=export) as running:
        yield running.step
