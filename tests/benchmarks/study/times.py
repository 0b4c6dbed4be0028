"""Step time of each row over that of BF16, by turns in one process on this machine, as `study/times.csv`.

The steps of the runs themselves say little of it: several runs share a GPU. Rows that change the precision during a
run are left out; their steps are those of their recipe and, after the switch, of BF16.
"""

from __future__ import annotations

import csv
import gc
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.quiet import quiet
from nvfp4_train.compose import compose
from nvfp4_train.config import RunConfig
from tests.benchmarks.study.cells import BASELINE, Row

FILE = "times.csv"
WARM_UP, PAIRS = 3, 15


def configurations(rows: Sequence[Row]) -> dict[str, RunConfig]:
    """Of the rows whose steps are all alike, by name."""
    found = {row.name: compose(["experiment=nano", *row.overrides]) for row in rows}
    return {name: config for name, config in found.items() if not config.precision.phases}


def measure(configs: dict[str, RunConfig]) -> Iterator[tuple[str, float, float]]:
    """(row, milliseconds of a step, over BF16) on random tokens, medians; `configs` as `configurations` gives them."""
    with quiet():  # a warning for every optional library that is not installed
        import torch

        from nvfp4_train.distributed import process_groups
        from tests.benchmarks.cpu_step import timed_by_turns
        from tests.benchmarks.training_step import TrainingStep

    def finished(step: TrainingStep) -> None:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    first = configs[BASELINE]
    with process_groups(first.parallel, first.seed) as world:
        baseline = TrainingStep(first, world, WARM_UP)
        for name, config in configs.items():
            step = TrainingStep(config, world, WARM_UP)
            paired = timed_by_turns(lambda: finished(baseline), lambda one=step: finished(one), PAIRS)
            yield name, paired.second_ms, paired.ratio
            del step
            gc.collect()


def to_csv(measured: dict[str, tuple[float, float]]) -> str:
    """`times.csv`: row, milliseconds of a step, over BF16."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["row", "step_ms", "ratio"])
    writer.writerows([row, f"{ms:.2f}", f"{ratio:.3f}"] for row, (ms, ratio) in measured.items())
    return buffer.getvalue()


def read(folder: Path) -> dict[str, tuple[float, float]]:
    """Row -> (milliseconds, ratio), as `to_csv` wrote them into a folder; empty where nothing was measured."""
    path = folder / FILE
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {line["row"]: (float(line["step_ms"]), float(line["ratio"])) for line in csv.DictReader(file)}
