"""What the study trains: rows (a recipe or a variant of one, as typed on the command line), each in several seeds, at
several lengths of training. A cell is one run.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from models.shapes import count_parameters, linear_shapes
from nvfp4_train.compose import compose
from nvfp4_train.config import RunConfig
from nvfp4_train.layout import tokens_per_step
from nvfp4_train.precision.assignment import LinearPrecision, assign
from nvfp4_train.precision.phases import Passes, resolve
from nvfp4_train.run_folder import FREE_WITHIN_IDENTITY
from nvfp4_train.schema import to_mapping

BASELINE, FP8, NVFP4, MXFP4 = CORE = ("bf16", "fp8_block", "nvfp4", "mxfp4")
CORE_SEEDS, OTHER_SEEDS = 3, 2
FOUR_BIT = ("nvfp4", "mxfp4")
LATE, LATER = 0.72, 0.82  # where a late switch begins: before the learning rate decays, and as published
MOST_ABOVE = 10.0  # percent of the linears' FLOPs that the recipe of our own may run above 4 bits
LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3)


@dataclass(frozen=True)
class Row:
    """A recipe or a variant of one.

    Attributes:
        name: in tables.
        overrides: what is typed to train it, besides what all rows share.
        what: it differs in, for the page.
        candidate: whether it is tried as the recipe of our own.
    """

    name: str
    overrides: tuple[str, ...]
    what: str = ""
    candidate: bool = False

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that it is trained with."""
        return tuple(range(1, 1 + (CORE_SEEDS if self.name in CORE else OTHER_SEEDS)))


def _variant(name: str, what: str, *overrides: str) -> Row:
    return Row(f"{NVFP4}, {name}", (f"precision={NVFP4}", *(f"precision.{text}" for text in overrides)), what)


def _phase(start: float, *passes: str) -> str:
    return f"phases=[{{start: {start}, {', '.join(f'{name}: bf16' for name in passes)}}}]"


def _candidate(name: str, what: str, recipe: str, *overrides: str) -> Row:
    texts = tuple(f"precision.{text}" for text in overrides)
    return Row(name, (f"precision={recipe}", *texts), what, candidate=True)


RECIPES = (
    "fp8_current", "fp8_delayed", "mxfp8", "nemotron3_super", "nvfp4_four_over_six", "quartet2",
    "nvfp4_fwd_bf16_bwd", "nvfp4_fwd_mxfp8_bwd", "mxfp8_fwd_nvfp4_bwd", "bf16_fwd_nvfp4_bwd",
)  # fmt: skip
VARIANTS = (
    _variant("nearest gradients", "no stochastic rounding", "gradient_rounding=nearest"),
    _variant("no rotation", "no Hadamard rotation in wgrad", "rotation=null"),
    _variant("1x16 weights", "weight blocks of 1x16, quantized again for dgrad", "weight_tile=[1,16]"),
    _variant("no BF16 blocks", "every block quantized", "bf16_blocks.last=0"),
    _variant("BF16 blocks first", "the first 15% of blocks in BF16, not the last", "bf16_blocks.first=0.15",
             "bf16_blocks.last=0"),
    _variant("late forward", f"forward pass in BF16 from {LATER:.0%} on", _phase(LATER, "forward")),
    _variant("late backward", f"backward pass in BF16 from {LATER:.0%} on", _phase(LATER, "backward")),
    _variant("late both", f"both passes in BF16 from {LATER:.0%} on", _phase(LATER, "forward", "backward")),
)  # fmt: skip
NO_BLOCKS = "bf16_blocks.last=0"
CANDIDATES = (
    _candidate("4/6 late", f"four over six, no BF16 blocks, forward in BF16 from {LATE:.0%} on",
               "nvfp4_four_over_six", NO_BLOCKS, _phase(LATE, "forward")),
    _candidate("quartet2 late", f"Quartet II, no BF16 blocks, forward in BF16 from {LATE:.0%} on",
               "quartet2", NO_BLOCKS, _phase(LATE, "forward")),
)  # fmt: skip


@dataclass(frozen=True)
class Length:
    """How long runs of one table are.

    Attributes:
        name: of the table.
        tokens_per_parameter: of the model's parameters, all counted.
    """

    name: str
    tokens_per_parameter: float


MAIN, LONG, TUNE = LENGTHS = (Length("main", 10), Length("long", 25), Length("tune", 4))


@dataclass(frozen=True)
class Cell:
    """One run: a row with a seed at a length."""

    length: Length
    row: Row
    seed: int

    @property
    def name(self) -> str:
        """Of its folder and its files."""
        return cell_name(self.length.name, self.row.name, self.seed)


def cell_name(table: str, row: str, seed: int) -> str:
    """`main-nvfp4-no-rotation-seed1`."""
    return f"{table}-{re.sub('[^A-Za-z0-9.]+', '-', row)}-seed{seed}"


def rows(sensitivity: Mapping[int, float] | None = None) -> tuple[Row, ...]:
    """Every row, the four of the core first.

    Args:
        sensitivity: block -> loss with that block alone quantized, over the loss without; with it there are candidates
            that keep the blocks in BF16 that lose most.
    """
    plain = tuple(Row(name, (f"precision={name}",)) for name in (*CORE, *RECIPES))
    return (*plain, *VARIANTS, *CANDIDATES, *by_sensitivity(sensitivity or {}))


def by_sensitivity(sensitivity: Mapping[int, float]) -> tuple[Row, ...]:
    """The candidates with BF16 blocks by measurement, within what may run above 4 bits: with as many blocks as that
    leaves room for, and with a late switch of the forward pass beside fewer. Without blocks that fit there is no row.
    """
    if not sensitivity:
        return ()
    config = compose(["experiment=nano"])
    late = 100 * (1 - LATER) / 3
    found = []
    for name, limit, phases in (("", MOST_ABOVE, ()), (" late", MOST_ABOVE - late, (_phase(LATER, "forward"),))):
        blocks = choose_blocks(sensitivity, config, limit)
        if blocks:
            rules = ", ".join(f"{{match: 'decoder.layers.{block}.*', format: bf16}}" for block in blocks)
            what = f"four over six, blocks {', '.join(map(str, blocks))} in BF16 by measured sensitivity"
            what += f", forward in BF16 from {LATER:.0%} on" if phases else ""
            texts = (NO_BLOCKS, f"rules=[{rules}]", *phases)
            found.append(_candidate(f"4/6 sensitive{name}", what, "nvfp4_four_over_six", *texts))
    return tuple(found)


def cells(length: Length, sensitivity: Mapping[int, float] | None = None) -> list[Cell]:
    """The runs of a table in the order in which they are taken: the core with all its seeds, then the others, seed by
    seed. The long table has the core alone, the one for tuning BF16 at several learning rates.
    """
    if length is TUNE:
        return [Cell(TUNE, Row(f"lr {lr:g}", ("precision=bf16", f"optimizer.lr={lr:g}")), 1) for lr in LEARNING_RATES]
    every = [Cell(length, row, seed) for row in rows(sensitivity) for seed in row.seeds]
    core = [cell for cell in every if cell.row.name in CORE]
    others = [cell for cell in every if cell.row.name not in CORE and length is MAIN]
    by_seed = sorted(core, key=lambda cell: cell.seed)
    return by_seed + sorted(others, key=lambda cell: cell.seed)


@dataclass(frozen=True)
class Plan:
    """A table as it is trained here.

    Attributes:
        length: of its runs.
        shared: overrides of all cells, such as where the data is.
        config: of a run without its row's overrides.
        corpus: start of the text's hash, as much of it as is kept with a run.
    """

    length: Length
    shared: tuple[str, ...]
    config: RunConfig
    corpus: str

    @classmethod
    def make(cls, length: Length, shared: Sequence[str], corpus: str, steps: int | None = None) -> Plan:
        """Compose the configuration; `steps` is for trying the study out, by default the length says them."""
        config = compose(["experiment=nano", *shared])
        tokens = length.tokens_per_parameter * count_parameters(config.model)
        steps = steps or math.ceil(tokens / tokens_per_step(config))
        return cls(length, tuple(shared), replace(config, steps=steps), corpus[:12])

    @property
    def tokens(self) -> int:
        """Of a run."""
        return self.config.steps * tokens_per_step(self.config)

    @property
    def setup(self) -> str:
        """Short hash of what its runs share besides the seed: model, text, batches, optimizer, schedule, steps."""
        mapping = to_mapping(self.config)
        data = {name: mapping["data"][name] for name in ("sequence_length", "global_batch", "packing")}
        shared = {name: mapping[name] for name in ("model", "optimizer", "schedule", "steps")}
        free = [name.rpartition(".")[2] for name in FREE_WITHIN_IDENTITY if name.startswith("model.")]
        shared["model"] = {name: value for name, value in shared["model"].items() if name not in free}
        text = json.dumps([shared, data, self.corpus], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def overrides(self, cell: Cell, run_dir: Path) -> list[str]:
        """What is typed to train a cell: `python -m nvfp4_train.train ...`. Health is sampled at the last step."""
        steps = self.config.steps
        return [
            "experiment=nano", *self.shared, *cell.row.overrides, f"seed={cell.seed}", f"steps={steps}",
            f"run_dir={run_dir}", "logging=off", f"logging.health_every={steps}", "evaluation.every=0",
            "checkpoint.every=0", "checkpoint.keep=1",
        ]  # fmt: skip

    def config_of(self, cell: Cell) -> RunConfig:
        """A cell's configuration."""
        return compose(self.overrides(cell, Path(cell.name)))


def above_four_bits(config: RunConfig, *, output_layer: bool) -> float:
    """Percent of the linears' FLOPs that run above 4 bits, on average over the run, phases included.

    A GEMM is in 4 bits where both of its operands are (`gemm_formats` names one format).

    Args:
        output_layer: count the output layer too, which no recipe quantizes; at nano size it is a quarter of all.
    """
    linears = [
        linear
        for linear in assign(config.precision, linear_shapes(config.model))
        if output_layer or linear.role != "output"
    ]
    stages = resolve(config.precision.phases, config.steps, tokens_per_step(config)).stages
    ends = [stage.step for stage in stages[1:]] + [config.steps + 1]
    work = sum(3 * linear.in_features * linear.out_features for linear in linears)
    above = sum(
        (end - stage.step) * _above(linear, stage.passes)
        for stage, end in zip(stages, ends, strict=True)
        for linear in linears
    )
    return 100 * above / (work * config.steps)


def _above(linear: LinearPrecision, passes: Passes) -> int:
    """GEMM work of a linear above 4 bits, in multiplications a token."""
    return sum(
        linear.in_features * linear.out_features
        for gemm, formats in linear.gemm_formats.items()
        if formats not in FOUR_BIT or (passes.forward if gemm == "fprop" else passes.backward) == "bf16"
    )


def choose_blocks(sensitivity: Mapping[int, float], config: RunConfig, limit: float) -> list[int]:
    """The blocks to keep in BF16: those that lose most a FLOP when they are quantized, as many as stay below `limit`.

    Args:
        sensitivity: block -> loss with that block alone quantized, over the loss without, in nats.
        config: of the model.
        limit: percent of the linears' FLOPs, the output layer aside.
    """
    sizes = dict(_block_sizes(config))
    chosen: list[int] = []
    room = limit / 100 * sum(sizes.values())
    for block in sorted(sensitivity, key=lambda block: -sensitivity[block] / sizes[block]):
        if sensitivity[block] > 0 and sizes[block] <= room:
            chosen.append(block)
            room -= sizes[block]
    return sorted(chosen)


def _block_sizes(config: RunConfig) -> Iterator[tuple[int, int]]:
    """(block, weights of its linears)."""
    sizes: dict[int, int] = {}
    for shape in linear_shapes(config.model):
        if shape.block is not None:
            sizes[shape.block] = sizes.get(shape.block, 0) + shape.in_features * shape.out_features
    yield from sizes.items()
