"""Learning rate: warm-up, stable, decay. No torch here: the plan prints it too.

A pure function of the step, so a resumed run needs no state to continue it exactly. A skipped step counts: the schedule
follows the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nvfp4_train.config import ConfigError, OptimizerConfig, ScheduleConfig
from nvfp4_train.duration import duration_of

# Share of the way from the last to the held learning rate, for a decay done to `x` in (0, 1]. Megatron's WSD shapes.
_DECAY: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "exponential": lambda x: 2 * 0.5**x - 1,
    "minus_sqrt": lambda x: 1 - math.sqrt(x),
}


@dataclass(frozen=True)
class Schedule:
    """Attributes: lr: held; final_lr: of the last step; warmup, decay: steps at both ends; steps: of the whole run."""

    lr: float
    final_lr: float
    warmup: int
    decay: int
    steps: int
    style: str

    def at(self, step: int) -> float:
        """Learning rate of step `step`, from 1: lr * step / warmup in the warm-up, `final_lr` at the last step."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        decayed = step - (self.steps - self.decay)
        if decayed <= 0:
            return self.lr
        return self.final_lr + (self.lr - self.final_lr) * _DECAY[self.style](min(1.0, decayed / self.decay))


def build_schedule(schedule: ScheduleConfig, optimizer: OptimizerConfig, steps: int, tokens_per_step: int) -> Schedule:
    """Resolve the durations of `schedule` for a run of `steps`.

    Raises:
        ConfigError: an unknown decay style, or warm-up and decay that together exceed the run.
    """
    if schedule.decay_style not in _DECAY:
        raise ConfigError(f"schedule.decay_style={schedule.decay_style!r}: known are {', '.join(_DECAY)}")
    first, last = (duration_of(f"schedule.{key}", getattr(schedule, key)) for key in ("warmup", "decay"))
    warmup, decay = first.steps(steps, tokens_per_step), last.steps(steps, tokens_per_step)
    if first.unit == last.unit == "share" and first.amount + last.amount <= 1:
        decay = min(decay, steps - warmup)  # both are rounded up, which may be a step too many
    if warmup + decay > steps:
        raise ConfigError(
            f"schedule.warmup is {warmup} steps and schedule.decay {decay}, together more than steps={steps}: "
            "shorten one of them, or write shares of the run, for example schedule.warmup=0.05 schedule.decay=0.2"
        )
    return Schedule(optimizer.lr, optimizer.lr * schedule.min_lr_ratio, warmup, decay, steps, schedule.decay_style)
