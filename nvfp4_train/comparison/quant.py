"""Quantization health as runs log it: `quant/<linear>/<operand>/<statistic>`, the names of `precision.health`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PREFIX = "quant/"


@dataclass(frozen=True)
class TensorHealth:
    """One operand of one linear: its statistics by name, as last logged."""

    linear: str
    operand: str
    statistics: Mapping[str, float]

    @property
    def block(self) -> int | None:
        """Global 0-based block number; None outside the blocks (the output layer)."""
        found = re.search(r"\.layers\.(\d+)\.", self.linear)
        return int(found[1]) if found else None

    @property
    def last_name(self) -> str:
        """The linear's name without its place: in_proj, out_proj, linear_qkv, linear_proj, linear_fc1, linear_fc2."""
        return self.linear.rsplit(".", 1)[-1]

    @property
    def label(self) -> str:
        """Linear and operand in short, the same in all blocks: `fc1 fprop_input`."""
        return f"{self.last_name.removeprefix('linear_')} {self.operand}"


def tensors(quant: Mapping[str, float]) -> list[TensorHealth]:
    """The tensors that `quant/...` metrics speak of, in the order in which they were logged."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for key, value in quant.items():
        parts = key.removeprefix(PREFIX).split("/")
        if len(parts) == 3:
            linear, operand, statistic = parts
            found.setdefault((linear, operand), {})[statistic] = value
    return [TensorHealth(linear, operand, statistics) for (linear, operand), statistics in found.items()]


def sampled(health: Sequence[TensorHealth], steps: Mapping[str, int]) -> str:
    """When these tensors were sampled, given the step of each metric: `step 50`, or `steps 50 to 80, each its last`."""
    names = (f"{PREFIX}{tensor.linear}/{tensor.operand}/{name}" for tensor in health for name in tensor.statistics)
    found = {steps[name] for name in names}
    return f"step {min(found)}" if len(found) == 1 else f"steps {min(found)} to {max(found)}, each its last sample"


@dataclass(frozen=True)
class HeatMap:
    """One statistic over a model: `values` [rows, columns], NaN where there is no such tensor."""

    title: str
    unit: str
    rows: list[str]
    columns: list[str]
    values: NDArray[np.float64]
    high_is_bad: bool


_MAPS = (
    ("flushed", "Share of values flushed to zero", "share", True),
    ("sqnr_db", "Signal to quantization noise", "dB", False),
)


def heat_maps(health: Sequence[TensorHealth]) -> list[HeatMap]:
    """Flushed share and SQNR, operands down and blocks across; without those that no tensor has."""
    maps = []
    for statistic, title, unit, high_is_bad in _MAPS:
        cells = {
            (tensor.label, tensor.block): tensor.statistics[statistic]
            for tensor in health
            if tensor.block is not None and statistic in tensor.statistics
        }
        if not cells:
            continue
        rows, columns = sorted({row for row, _ in cells}), sorted({column for _, column in cells})
        values = np.array([[cells.get((row, column), np.nan) for column in columns] for row in rows])
        maps.append(HeatMap(title, unit, rows, [str(column) for column in columns], values, high_is_bad))
    return maps
