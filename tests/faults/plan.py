"""What a seed means: the layout and recipe of a run, how its launcher may restart it, and where it is hit."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.faults.moments import KINDS, LAUNCHER, Hit
from tests.trainer.conftest import TINY

STEPS, SAVES, TIMEOUT = 10, 3, 6.0
SEEDS = (76, 23)  # those that every test run repeats: of the first layout, and alone
ALONE = "alone nvfp4"  # one process, without a launcher and without anybody who watches it
LAYOUTS: dict[str, list[str]] = {
    "replicas nvfp4": ["precision=nvfp4"],
    "sharded fp8_delayed": ["precision=fp8_delayed", "parallel=replicas"],
    "pipeline nvfp4": ["precision=nvfp4", "parallel.pipeline=2"],
    ALONE: ["precision=nvfp4"],
}
# With two micro-batches a step these train bit for bit what replicas train: one run that nothing hit is enough.
SAME_AS = {"pipeline nvfp4": "replicas nvfp4", ALONE: "replicas nvfp4"}
OVERRIDES = [
    f"steps={STEPS}",
    f"checkpoint.every={SAVES}",
    "evaluation.every=4",
    "data.global_batch=4",
    "data.micro_batch=2",
    f"parallel.timeout={TIMEOUT}",
]
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")
# Saves and evaluations are short, and what goes wrong there is worth the most.
WEIGHTS = dict(zip(KINDS, (12, 6, 10, 10, 8, 16, 34, 4), strict=True))
Calls = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Plan:
    """One run: its layout, restarts that the launcher does itself, and faults, one a start in this order."""

    seed: int
    layout: str
    restarts: int
    hits: tuple[Hit, ...]

    def overrides(self, where: Sequence[str]) -> list[str]:
        """Of the training command; `where` are those of folders."""
        return [*TINY, *OVERRIDES, *LAYOUTS[self.layout], *where]


def plan(seed: int, calls: Mapping[str, Sequence[Calls]]) -> Plan:
    """The run of a seed.

    Args:
        calls: by layout and rank, how many calls each phase of a kind had in the run that nothing hit, in order.
    """
    draw = random.Random(seed)
    layout = list(LAYOUTS)[seed % len(LAYOUTS)]
    number = draw.choice((1, 1, 2, 3))
    hits = tuple(_hit(draw, calls[layout], alone=layout == ALONE, first=not earlier) for earlier in range(number))
    return Plan(seed, layout, 0 if layout == ALONE else draw.choice((0, 0, 2)), hits)


def _hit(draw: random.Random, calls: Sequence[Calls], *, alone: bool, first: bool) -> Hit:
    kind = draw.choices(KINDS, [WEIGHTS[kind] for kind in KINDS])[0]
    target = 0 if alone else draw.choice((0, 1, LAUNCHER))
    rank = draw.choice((0, 1)) if target == LAUNCHER else target
    had = calls[rank][kind]
    # A start that goes on from a checkpoint has fewer phases before it.
    occurrence = draw.randint(1, len(had) if first else 1)
    call = draw.randint(1, had[occurrence - 1])
    return Hit(draw.choice(SIGNALS[:2] if alone else SIGNALS), target, rank, kind, occurrence, call)
