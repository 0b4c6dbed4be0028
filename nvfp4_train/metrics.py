"""`metrics.jsonl`: one JSON object a line, written whole. No torch here.

Every step writes `step`, `tokens` and `train/loss`; the other names are there when there is something to say. A number
that is not finite is written as null, because JSON has no other word for it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

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
        written = os.write(self._descriptor, data)
        if written != len(data):
            raise OSError(
                f"{self.path}: {written} of {len(data)} bytes of a metrics line were written; the disk is full"
            )

    def cut_after(self, step: int) -> int:
        """Drop the lines of steps after `step`, and a torn last line, all or none; returns how many went."""
        self.close()
        if not self.path.exists():
            return 0
        lines = self.path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) != len(lines):
            temporary = self.path.with_name(self.path.name + ".tmp")
            with open(temporary, "w") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        return len(lines) - len(kept)

    def flush(self) -> None:
        """Make every line durable, as a checkpoint is that follows them."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _step_of(line: str) -> float:
    """Step of a line; infinity for one that is torn or no JSON object, so that it is cut."""
    if not line.endswith("\n"):
        return math.inf
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def read_metrics(path: Path) -> list[Metrics]:
    """The whole lines of a metrics file, in order."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
