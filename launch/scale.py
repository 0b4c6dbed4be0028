"""What a layout of the 12B costs on many GPUs, in closed form: the tables of this folder's README. No torch here.

`python -m launch.scale` prints the tables; `--write` puts them into the README. Every number follows from a
configuration, from `nvfp4_train.memory` and `models.shapes`, and from ASSUMED. Bytes are of one rank; n is the size of
a group.

A rank's parameters P: of its pipeline stage, over tensor-parallel ranks (norms, which all hold, counted as shared).
Traffic that a rank sends in a step, with m micro-batches, t tokens of one on a context rank, hidden size h:

    gradients    4 P (n - 1) / n summed and scattered, as much again to gather weights, over n = data * context ranks
    tensor       2 h t (n - 1) / n a collective, m times: gather and scatter in each block's forward pass; backward as
                 much, and the input gathered again where it is not kept quantized; 2 at the embedding, 3 at the head
    pipeline     2 h t / tensor a micro-batch to the next stage, and as much back
    context      attention: keys and values of the other ranks, and their gradients; Mamba: (n - 1) / n of in_proj's
                 output and the scan's, forward and backward
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from models.config import ModelConfig
from models.shapes import (
    ATTENTION,
    MAMBA,
    count_block_parameters,
    flops_per_token,
    linear_shapes,
    mamba_in_proj_width,
    mamba_inner_size,
    padded_vocab_size,
    stage_patterns,
)
from nvfp4_train.cards import bf16_peak
from nvfp4_train.compose import compose
from nvfp4_train.config import RunConfig
from nvfp4_train.layout import check_run, model_ranks
from nvfp4_train.memory import Memory, Place, kept_quantized, rank_memory
from nvfp4_train.precision.assignment import LinearPrecision, assign
from nvfp4_train.precision.fit import ROW_PARALLEL_ROLES

README = Path(__file__).with_name("README.md")
PLACE = re.compile(r"(<!-- paper-scale -->\n).*?(<!-- /paper-scale -->)", re.DOTALL)
EXPERIMENT = "nemotron_nano_12b_v2"
PUBLISHED_BATCH = 736  # sequences, of arXiv 2509.25149


@dataclass(frozen=True)
class Assumed:
    """What is not computed but assumed, each with its reason in the README."""

    card: str = "H200"
    memory: float = 139 * 2**30  # bytes of a GPU
    gpus_per_node: int = 8
    efficiency: float = 0.45  # of the dense BF16 peak, while a GPU computes
    node_link: float = 300e9  # bytes a second each way between GPUs of a node
    network: float = 40e9  # and between nodes, a GPU
    node_write: float = 2e9  # bytes a second that a node writes
    storage_write: float = 100e9  # and all of them together
    hours_between_failures: float = 50_000.0  # of one GPU, with its share of everything else
    restart: float = 600.0  # seconds from a failure to the first new step


ASSUMED = Assumed()
LAYOUTS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (64, ("parallel.tensor=2",)),
    (512, ("parallel.tensor=4", "parallel.pipeline=2", "parallel.context=2")),
    (4096, ("parallel.tensor=8", "parallel.pipeline=2", "data.global_batch=768")),
    (4096, ("parallel.tensor=4", "data.global_batch=3072")),
)


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, before tensor-parallel ranks share it.

    Attributes:
        model: with this stage's blocks alone in its pattern.
        linears: of the stage.
        sequence_length: of the run.
        first, last: whether it holds the embedding, and the last norm and the output layer.
        blocks: their numbers in the whole model.
    """

    model: ModelConfig
    linears: tuple[LinearPrecision, ...]
    sequence_length: int
    first: bool
    last: bool
    blocks: range

    @property
    def parameters(self) -> int:
        """All of its parameters; the final norm is the last stage's."""
        blocks = sum(count_block_parameters(self.model, letter) for letter in self.model.pattern)
        vocabulary = padded_vocab_size(self.model) * self.model.hidden_size
        return blocks + vocabulary * (self.first + self.last) + self.model.hidden_size * self.last

    @property
    def flops(self) -> int:
        """Of a token, forward and backward."""
        found = flops_per_token(self.model, self.sequence_length)
        return 3 * (found.forward - (0 if self.last else found.head))


class Scale:
    """A layout on `gpus` GPUs, in numbers. Raises what `check_run` raises where it does not fit."""

    def __init__(self, gpus: int, overrides: Sequence[str], assumed: Assumed = ASSUMED) -> None:
        self.gpus, self.assumed = gpus, assumed
        self.arguments = [f"experiment={EXPERIMENT}", "parallel=replicas", "parallel.sequence=true", *overrides]
        self.config: RunConfig = compose(self.arguments)
        check_run(self.config, gpus)
        parallel, data = self.config.parallel, self.config.data
        assert parallel.virtual_pipeline == 1, "interleaved stages hold more micro-batches than is counted here"
        assert parallel.sequence or parallel.tensor == 1, "without it norms and collectives cost more than counted here"
        self.tensor, self.pipeline, self.context = parallel.tensor, parallel.pipeline, parallel.context
        self.data = gpus // model_ranks(parallel)
        self.micro_batches = data.global_batch // (data.micro_batch * self.data)
        self.tokens = data.micro_batch * data.sequence_length // self.context  # of a micro-batch, on a rank
        self.stages = self._stages()

    def _stages(self) -> list[Stage]:
        model, length = self.config.model, self.config.data.sequence_length
        linears = assign(self.config.precision, linear_shapes(model), self.tensor)
        patterns = stage_patterns(model, self.pipeline)
        stages, start = [], 0
        for number, letters in enumerate(patterns):
            last, blocks = number == len(patterns) - 1, range(start, start + len(letters))
            own = [linear for linear in linears if (last if linear.block is None else linear.block in blocks)]
            stages.append(Stage(replace(model, pattern=letters), tuple(own), length, number == 0, last, blocks))
            start += len(letters)
        return stages

    # ---- memory

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes of the rank that needs most, by part."""
        needed = max((self._stage_memory(number) for number in range(self.pipeline)), key=lambda found: found.total)
        return {name: size for name, size in asdict(needed).items() if name != "optimizer_step"}

    def _stage_memory(self, number: int) -> Memory:
        stage = self.stages[number]
        place = Place(
            tuple(stage.blocks),
            stage.last,
            parameters=stage.parameters // self.tensor,
            tensor=self.tensor,
            sequence=self.config.parallel.sequence,
            sharing=self.data * self.context if self.config.parallel.distributed_optimizer else 1,
            kept=min(self.micro_batches, self.pipeline - number),
        )
        linears = [linear for other in self.stages for linear in other.linears]
        return rank_memory(self.config.model, linears, self.tokens, place)

    # ---- traffic

    @cached_property
    def traffic(self) -> dict[str, float]:
        """Bytes that a rank sends in a step, by kind; of the stage that sends most."""
        model, batches = self.config.model, self.micro_batches
        replicas = self.data * self.context
        gradients = 4 * max(stage.parameters for stage in self.stages) / self.tensor * _others(replicas)
        token = 2 * model.hidden_size
        collectives = max(self._collectives(stage) for stage in self.stages)
        neighbours = min(2, self.pipeline - 1)
        return {
            "gradients": gradients,
            "weights": gradients,
            "tensor": token * self.tokens * _others(self.tensor) * collectives * batches,
            "pipeline": token * self.tokens / self.tensor * neighbours * batches,
            "context": max(self._context_bytes(stage) for stage in self.stages) * batches,
        }

    def _collectives(self, stage: Stage) -> int:
        """Gathers and scatters of a micro-batch's hidden states between tensor-parallel ranks."""
        again = sum(_column(linear) and not kept_quantized(linear) for linear in stage.linears)
        return 4 * len(stage.model.pattern) + again + 2 * stage.first + 2 * stage.last

    def _context_bytes(self, stage: Stage) -> float:
        model, letters, n = stage.model, stage.model.pattern, self.context
        key_value = (
            2 * 2 * 2 * model.num_query_groups * model.head_dim * (n - 1)
        )  # bytes, keys and values, there and back
        mamba = 2 * 2 * (mamba_in_proj_width(model) + mamba_inner_size(model)) * _others(n)
        a_token = key_value * letters.count(ATTENTION) + mamba * letters.count(MAMBA)
        return a_token / self.tensor * self.tokens

    # ---- time

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Of a step, by what it waits for."""
        assumed, traffic = self.assumed, self.traffic
        compute = self._compute
        context_link = assumed.node_link if self.tensor * self.context <= assumed.gpus_per_node else assumed.network
        exchange = traffic["tensor"] / assumed.node_link + traffic["context"] / context_link
        a_batch = (compute + exchange) / self.micro_batches
        sums, gathers = traffic["gradients"] / assumed.network, traffic["weights"] / assumed.network
        return {
            "compute": compute,
            "tensor and context": exchange,
            "pipeline": (self.pipeline - 1) * a_batch + traffic["pipeline"] / assumed.network,
            # hidden behind the last micro-batch's backward pass and the first one's forward pass, and no more
            "gradients and weights": max(0.0, sums - a_batch * 2 / 3) + max(0.0, gathers - a_batch / 3),
        }

    @property
    def _compute(self) -> float:
        """Seconds of products, recompute included, on a rank of the slowest stage."""
        peak = bf16_peak(self.assumed.card)
        assert peak is not None
        tokens = self.tokens * self.micro_batches
        most = max(stage.flops for stage in self.stages) * (4 / 3 if self.config.model.recompute == "full" else 1)
        return most * tokens / self.tensor / (peak * 1e12 * self.assumed.efficiency)

    @property
    def step(self) -> float:
        """Seconds."""
        return sum(self.seconds.values())

    @property
    def bubble(self) -> float:
        """Share of its passes that a rank waits for the pipeline to fill and drain."""
        return (self.pipeline - 1) / (self.micro_batches + self.pipeline - 1)

    @property
    def mfu(self) -> float:
        """Of the dense BF16 peak."""
        peak = bf16_peak(self.assumed.card)
        assert peak is not None
        data = self.config.data
        flops = flops_per_token(self.config.model, data.sequence_length).training
        return flops * data.global_batch * data.sequence_length / (self.step * self.gpus * peak * 1e12)

    # ---- checkpoints and failures

    @property
    def checkpoint_bytes(self) -> int:
        """FP32 weights and both moments."""
        return 12 * sum(stage.parameters for stage in self.stages)

    @property
    def write(self) -> float:
        """Seconds of a save."""
        nodes = self.gpus // self.assumed.gpus_per_node
        return self.checkpoint_bytes / min(nodes * self.assumed.node_write, self.assumed.storage_write)

    @property
    def between_failures(self) -> float:
        """Seconds."""
        return self.assumed.hours_between_failures * 3600 / self.gpus

    @property
    def interval(self) -> float:
        """Seconds between saves that lose least: sqrt(2 * write * time between failures), Young 1974."""
        return math.sqrt(2 * self.write * self.between_failures)

    @property
    def lost(self) -> float:
        """Share of time that is lost: saving, work since the last save, and starting again."""
        return self.write / self.interval + (self.interval / 2 + self.assumed.restart) / self.between_failures

    @property
    def days(self) -> float:
        """Of the whole run."""
        return self.config.steps * self._steps_ratio * self.step / (1 - self.lost) / 86400

    @property
    def _steps_ratio(self) -> float:
        """The published run's steps are of 736 sequences; another global batch takes others for the same tokens."""
        return PUBLISHED_BATCH / self.config.data.global_batch


def _others(ranks: int) -> float:
    """(n - 1) / n: what a ring collective sends of the whole."""
    return (ranks - 1) / ranks


def _column(linear: LinearPrecision) -> bool:
    """Whether tensor-parallel ranks share its out-features, so that it takes whole inputs."""
    return linear.role not in ROW_PARALLEL_ROLES


# ---- the README

GIB = 2**30


def rows(scale: Scale) -> list[tuple[str, str]]:
    """What the table says of a layout: what it is about, and the value."""
    memory, traffic, seconds, data = scale.memory, scale.traffic, scale.seconds, scale.config.data
    tokens = data.global_batch * data.sequence_length
    split = (scale.tensor, scale.pipeline, scale.context, scale.data)
    return [
        ("tensor x pipeline x context x data", " x ".join(map(str, split))),
        ("global batch, sequences (tokens a GPU)", f"{data.global_batch} ({tokens / scale.gpus:,.0f})"),
        ("micro-batches a step", f"{scale.micro_batches}"),
        ("**memory a GPU**", f"**{sum(memory.values()) / GIB:.0f} GiB**"),
        *((f"{name.replace('_', ' ')}, GiB", f"{size / GIB:.1f}") for name, size in memory.items()),
        ("**sent by a GPU in a step**", f"**{sum(traffic.values()) / 1e9:.0f} GB**"),
        *((f"{name}, GB", f"{size / 1e9:.1f}") for name, size in traffic.items()),
        ("**a step**", f"**{scale.step:.2f} s**"),
        *((f"{name}, s", f"{size:.2f}") for name, size in seconds.items()),
        ("pipeline bubble", f"{scale.bubble:.0%}"),
        ("**expected MFU, of dense BF16**", f"**{scale.mfu:.0%}**"),
        ("checkpoint; a save", f"{scale.checkpoint_bytes / 1e9:.0f} GB; {scale.write:.1f} s"),
        ("time between failures", f"{scale.between_failures / 3600:.0f} h"),
        ("save every (least loss)", f"{scale.interval / 60:.0f} min, {round(scale.interval / scale.step):,} steps"),
        ("time lost to saves and failures", f"{scale.lost:.1%}"),
        ("days for 10T tokens", f"{scale.days:.0f}"),
    ]


def tables() -> str:
    """The README's table, and the command that builds each layout without its GPUs."""
    scales = [Scale(gpus, overrides) for gpus, overrides in LAYOUTS]
    columns = [rows(scale) for scale in scales]
    lines = ["| GPUs | " + " | ".join(f"{scale.gpus:,}" for scale in scales) + " |", "|---" * (len(scales) + 1) + "|"]
    for cells in zip(*columns, strict=True):
        lines.append(f"| {cells[0][0]} | " + " | ".join(value for _, value in cells) + " |")
    commands = [f"    python -m nvfp4_train.plan {' '.join(scale.arguments)} --world {scale.gpus}" for scale in scales]
    return "\n".join([*lines, "", *commands, ""])


def main() -> None:
    """Print the tables, or put them into the README."""
    if sys.argv[1:] == ["--write"]:
        README.write_text(PLACE.sub(lambda found: found[1] + tables() + found[2], README.read_text()))
    else:
        print(tables())


if __name__ == "__main__":
    main()
