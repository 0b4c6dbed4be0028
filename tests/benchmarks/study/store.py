"""What is kept of a run, small enough for the repository: a line of `runs.csv`, and its curve at every step.

study/runs.csv                      a line a run
study/curves/<cell>-<setup>.npz     losses at every step in FP32, and the hash of all of its batches
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from nvfp4_train.comparison.match import smooth
from nvfp4_train.comparison.quant import tensors
from nvfp4_train.comparison.runs import METRICS, Curve, Run, open_run
from nvfp4_train.metrics import read_metrics
from nvfp4_train.storage import write_atomic
from tests.benchmarks.study.cells import Cell, Plan, above_four_bits, cell_name

RUNS, CURVES = "runs.csv", "curves"
OPERANDS = ("fprop_input", "fprop_weight", "dgrad_gradient", "dgrad_weight", "wgrad_gradient", "wgrad_input")


@dataclass(frozen=True)
class Record:
    """A line of `runs.csv`.

    Attributes:
        table, row, seed: the cell; `setup`: see `Plan.setup`.
        corpus: start of the text's hash.
        train_loss, val_loss: nats: the smoothed training loss at the end, the validation after it; NaN where the run
            diverged.
        linear_percent: of the linears' FLOPs in low precision, as the precision report counts.
        above_four, above_four_output: percent of them above 4 bits on average over the run, without and with the
            output layer.
        zeros, zeros_worst: share of exact zeros in the weight gradients of quantized linears at the end, by weights;
            the largest of a linear.
        flushed: share of values that quantization made zero at the end, the mean over linears, by operand.
        flushed_worst: the largest, with its linear and operand.
        step_ms: median step while `jobs` runs were at work at once; seconds: of all steps.
    """

    table: str
    row: str
    seed: int
    setup: str
    corpus: str
    steps: int
    tokens: int
    train_loss: float
    val_loss: float
    linear_percent: float
    above_four: float
    above_four_output: float
    zeros: float
    zeros_worst: float
    flushed: str
    flushed_worst: str
    step_ms: float
    seconds: float
    jobs: int
    device: str
    torch: str

    @property
    def cell(self) -> tuple[str, str, int]:
        """What tells it from the others of its set-up."""
        return self.table, self.row, self.seed

    def flushed_shares(self) -> dict[str, float]:
        """Share by operand; without those that are not quantized at the end."""
        return {name: float(share) for name, share in (pair.split("=") for pair in self.flushed.split())}


def record(plan: Plan, cell: Cell, folder: Path, jobs: int) -> Record:
    """The line of a finished run."""
    run = open_run(folder)
    times = [line["time/step_s"] for line in read_metrics(folder / METRICS)]
    surroundings = json.loads((folder / "environment.json").read_text())
    assert run.precision is not None
    config = plan.config_of(cell)
    ended_well = bool(np.isfinite(run.train.losses[-1]))
    return Record(
        table=cell.length.name,
        row=cell.row.name,
        seed=cell.seed,
        setup=plan.setup,
        corpus=plan.corpus,
        steps=len(run.train),
        tokens=int(run.train.tokens[-1]),
        train_loss=round(float(smooth(run.train)[-1]), 6) if ended_well else math.nan,
        val_loss=round(float(run.val.losses[-1]), 6) if len(run.val) else math.nan,
        linear_percent=round(run.precision["coverage"]["linear_percent"], 2),
        above_four=round(above_four_bits(config, output_layer=False), 2),
        above_four_output=round(above_four_bits(config, output_layer=True), 2),
        **_health(run),
        step_ms=round(1e3 * statistics.median(times), 2),
        seconds=round(sum(times), 1),
        jobs=jobs,
        device=surroundings["device"],
        torch=surroundings["versions"]["torch"],
    )


def _health(run: Run) -> dict[str, Any]:
    """The health columns, from the run's last sample."""
    assert run.precision is not None
    linears = {linear["name"]: linear for linear in run.precision["linears"] if linear["format"] != "bf16"}
    zeros: list[tuple[float, int]] = []
    flushed: dict[str, list[float]] = {name: [] for name in OPERANDS}
    worst = (0.0, "")
    for tensor in tensors(run.quant):
        linear = linears.get(tensor.linear)
        if linear is None:
            continue
        if "zeros" in tensor.statistics:
            zeros.append((tensor.statistics["zeros"], linear["in_features"] * linear["out_features"]))
        if "flushed" in tensor.statistics:
            share = tensor.statistics["flushed"]
            flushed[tensor.operand].append(share)
            worst = max(worst, (share, f"{tensor.linear}/{tensor.operand}"))
    weights = sum(count for _, count in zeros)
    mean = sum(share * count for share, count in zeros) / weights if weights else math.nan
    means = {name: statistics.fmean(shares) for name, shares in flushed.items() if shares}
    return {
        "zeros": round(mean, 6),
        "zeros_worst": round(max((share for share, _ in zeros), default=math.nan), 6),
        "flushed": " ".join(f"{name}={share:.5f}" for name, share in means.items()),
        "flushed_worst": f"{worst[0]:.5f} {worst[1]}" if worst[1] else "",
    }


class Store:
    """A folder with `runs.csv` and the curves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def records(self) -> list[Record]:
        """Every line, in order."""
        path = self.folder / RUNS
        if not path.is_file():
            return []
        kinds = {field.name: {"int": int, "float": float}.get(str(field.type), str) for field in fields(Record)}
        with path.open(newline="") as file:
            return [Record(**{key: kinds[key](value) for key, value in line.items()}) for line in csv.DictReader(file)]

    def add(self, new: Record, run: Run) -> None:
        """Keep a run: its curve first, then its line; over an earlier one of the same cell and set-up. Whole or not."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            (self.folder / CURVES).mkdir(exist_ok=True)
            write_atomic(self._curve(new), curve_bytes(run))
            others = [old for old in self.records() if (old.cell, old.setup) != (new.cell, new.setup)]
            write_atomic(self.folder / RUNS, to_csv([*others, new]))

    def run(self, found: Record) -> Run:
        """A run as `comparison` reads it: its curves, its seed, and its set-up in the place of its model."""
        with np.load(self._curve(found)) as kept:
            steps = np.arange(1, 1 + len(kept["train"]), dtype=np.int64)
            tokens = steps * int(kept["tokens_per_step"])
            train = Curve(steps, tokens, kept["train"].astype(np.float64))
            at = kept["val_steps"].astype(np.int64)
            val = Curve(at, at * int(kept["tokens_per_step"]), kept["val"].astype(np.float64))
            batches = str(kept["batches"])
        return Run(
            name=f"{found.row}, seed {found.seed}",
            path=self._curve(found),
            train=train,
            val=val,
            hashes=dict.fromkeys(steps.tolist(), batches),
            config={"seed": found.seed, "model": found.setup},
            precision={"coverage": {"linear_percent": found.linear_percent}},
        )

    def _curve(self, found: Record) -> Path:
        return self.folder / CURVES / f"{cell_name(*found.cell)}-{found.setup}.npz"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / f".{RUNS}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def curve_bytes(run: Run) -> bytes:
    """The .npz of a run; `batches` is one hash over those of all of its steps."""
    steps = run.train.steps
    assert np.array_equal(steps, np.arange(1, 1 + len(steps))), "a step is missing"
    per_step = int(run.train.tokens[0])
    assert np.array_equal(run.train.tokens, per_step * steps), "steps of several sizes"
    batches = hashlib.sha256("".join(run.hashes[int(step)] for step in steps).encode()).hexdigest()[:16]
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        tokens_per_step=np.int64(per_step),
        train=run.train.losses.astype(np.float32),
        val_steps=run.val.steps,
        val=run.val.losses.astype(np.float32),
        batches=np.array(batches),
    )
    return buffer.getvalue()


def to_csv(records: Sequence[Record]) -> str:
    """The content of `runs.csv`."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [field.name for field in fields(Record)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(one) for one in records)
    return buffer.getvalue()


def newest_setup(records: Sequence[Record], table: str) -> str | None:
    """The set-up that most runs of a table share, the later one of two; None without a run."""
    counts: dict[str, int] = {}
    for one in records:
        if one.table == table:
            counts[one.setup] = counts.get(one.setup, 0) + 1
    return max(reversed(counts), key=lambda setup: counts[setup], default=None)
