"""`metrics.jsonl`: one JSON object a line, written whole. No torch here.

Every step writes `step`, `tokens` and `train/loss`; the other names are there when there is something to say. A number
that is not finite is written as null, because JSON has no other word for it.
"""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

from nvfp4_train.precision.phases import Passes
from nvfp4_train.storage import named, write_atomic

Metrics = dict[str, Any]


def finite_or_none(value: Any) -> Any:
    """`value`, or None where it is a float that JSON cannot hold (inf, nan)."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsFile:
    """Appends lines to `path`; a reader never sees half of one.

    A resumed run calls `cut_after` before its first `write`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def write(self, metrics: Metrics) -> None:
        """Append `metrics` as one line, in a single system call that ends with the newline."""
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        line = json.dumps({name: finite_or_none(value) for name, value in metrics.items()}, allow_nan=False)
        data = (line + "\n").encode()
        with named(self.path):
            written = os.write(self._descriptor, data)
            if written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def cut_after(self, step: int, first: int = 1) -> str | None:
        """Drop the lines of steps after `step`, a torn last line, and lines that can't be read; keep all others.

        Args:
            step: of the checkpoint that the run goes on from.
            first: step that the file begins with.

        Returns:
            A warning that names the file and what is lost, None where every step from `first` to `step` is there.
        """
        self.close()
        content = self.path.read_bytes() if self.path.exists() else b""
        lines = content.split(b"\n")
        steps = [_step_of(line) for line in lines]
        kept = [
            line + b"\n" for line, number in zip(lines, steps, strict=True) if number is not None and number <= step
        ]
        if b"".join(kept) != content:
            write_atomic(self.path, b"".join(kept))
        unread = [
            str(number) for number, line in enumerate(lines[:-1], 1) if line.strip() and steps[number - 1] is None
        ]
        missing = sorted(set(range(first, step + 1)) - set(steps))
        if not unread and not missing:
            return None
        parts = [f"line {', '.join(unread)} can't be read and was dropped"] if unread else []
        parts += [f"no line for step {_ranges(missing)}"] if missing else []
        return f"{self.path}: {'; '.join(parts)}. The run goes on; these values are lost"

    def flush(self) -> None:
        """Make every line durable, as a checkpoint is that follows them."""
        if self._descriptor is not None:
            with named(self.path):
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _step_of(line: bytes) -> int | None:
    """Step of a line; None for one that is torn or no JSON object with a step."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


def _ranges(numbers: list[int]) -> str:
    """`3, 5 to 7` of sorted numbers."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(group[0]) if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in groups)


def read_metrics(path: Path) -> list[Metrics]:
    """The whole lines of a metrics file, in order."""
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def marked_passes(path: Path) -> Passes:
    """The passes that the lines of a metrics file leave in force: those of the last marker, else the recipe's."""
    lines = read_metrics(path) if path.is_file() else []
    marked = [line for line in lines if "precision/forward" in line]
    return Passes(marked[-1]["precision/forward"], marked[-1]["precision/backward"]) if marked else Passes()
