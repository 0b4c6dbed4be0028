"""Which passes run in the recipe's precision at which step. No torch here.

The published late switch sends the forward GEMMs back to BF16 for the last part of a run (arXiv 2509.25149, section on
switching): `precision.phases=[{start: 0.82, forward: bf16}]`. Steps are counted from 1, as in `metrics.jsonl`; a phase
that starts at a duration of 820 steps leaves steps 1 to 820 as they were and is in force from step 821 on. Which passes
are in force is a function of the step alone, so a resumed run needs no state to continue it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from nvfp4_train.config import ConfigError
from nvfp4_train.duration import Duration
from nvfp4_train.precision.assignment import LinearPrecision
from nvfp4_train.precision.config import Phase, PrecisionError


class Passes(NamedTuple):
    """What the forward pass (fprop) and the backward pass (dgrad, wgrad) run in: `recipe` or `bf16`."""

    forward: str = "recipe"
    backward: str = "recipe"

    def __str__(self) -> str:
        words = {"recipe": "as the recipe says", "bf16": "in BF16"}
        return f"forward {words[self.forward]}, backward {words[self.backward]}"


class Stage(NamedTuple):
    """Passes in force from `step` (counted from 1) on, and where that step comes from."""

    step: int
    passes: Passes
    start: str

    @property
    def text(self) -> str:
        """A line for the console."""
        return f"precision from step {self.step} ({self.start}) on: {self.passes}"


@dataclass(frozen=True)
class PassSchedule:
    """Attributes: stages: in order of steps, the first one at step 1."""

    stages: tuple[Stage, ...]

    def at(self, step: int) -> Passes:
        """The passes in force at optimizer step `step`, 1 to the run's steps."""
        assert step >= 1, f"steps are counted from 1, got {step}"
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage.step) - 1].passes

    @property
    def switches(self) -> tuple[Stage, ...]:
        """The stages that begin during the run; each has the `step` and the `text` to announce."""
        return self.stages[1:]


def resolve(phases: Sequence[Phase], steps: int, tokens_per_step: int) -> PassSchedule:
    """Turn phases as they are written into steps of one run.

    Args:
        phases: in order of their start.
        steps: optimizer steps of the run.
        tokens_per_step: tokens of a global batch.

    Raises:
        PrecisionError: a start that is no duration, phases out of order, a start at or beyond the end of the run, a
            phase that changes nothing.
    """
    stages = [Stage(1, Passes(), "the start")]
    for index, phase in enumerate(phases):
        where = f"precision.phases[{index}]"
        first = _first_step(phase, where, steps, tokens_per_step)
        before = stages[-1]
        if index > 0 and first <= before.step:
            raise PrecisionError(
                f"{where} starts at {phase.start}, which is step {first} of {steps}, but the phase before it starts at "
                f"step {before.step}: write phases in order of their start, each with a step of its own."
            )
        passes = Passes(phase.forward or before.passes.forward, phase.backward or before.passes.backward)
        if passes == before.passes:
            raise PrecisionError(
                f"{where} (start {phase.start}) changes nothing: before it, {before.passes}. Leave it out."
            )
        stage = Stage(first, passes, str(Duration.parse(phase.start)))
        stages = [stage] if first == 1 else [*stages, stage]
    return PassSchedule(tuple(stages))


def check_something_runs(schedule: PassSchedule, assignments: Sequence[LinearPrecision], recipe: str) -> None:
    """Refuse phases that leave nothing of a recipe: a run that calls itself 4-bit multiplies something in 4 bits.

    Raises:
        PrecisionError: linears are quantized, but in no phase is the pass that quantizes them in force.
    """
    gemms = {gemm for linear in assignments for gemm, name in linear.gemm_formats.items() if name != "bf16"}
    needs = {"forward" if gemm == "fprop" else "backward" for gemm in gemms}
    if needs and not any(getattr(stage.passes, name) == "recipe" for stage in schedule.stages for name in needs):
        raise PrecisionError(
            f"precision.phases send all of recipe {recipe} to BF16 from step 1 to the last, so that nothing is ever "
            "quantized. Start them later, or write precision=bf16."
        )


def _first_step(phase: Phase, where: str, steps: int, tokens_per_step: int) -> int:
    try:
        done = Duration.parse(phase.start).steps(steps, tokens_per_step)
    except ConfigError as error:
        raise PrecisionError(f"{where}.start: {error}") from error
    if done >= steps:
        total = f"{steps} steps or {steps * tokens_per_step:,} tokens"
        raise PrecisionError(
            f"{where} starts after {phase.start}, which is {done} steps, but the run ends after {total}: it would "
            f"never begin. The latest start is {_latest(steps)}. Start it there or earlier, or leave it out."
        )
    return done + 1


def _latest(steps: int) -> str:
    """The last start of a phase that still begins in a run of `steps`: steps, and a share where one fits."""
    last = steps - 1
    share = math.floor(Fraction(last, steps) * 1000) / 1000
    as_share = f" (or {share:g} of the run)" if share > 0 else ""
    return f"{last}, which leaves the last step to it{as_share}"
