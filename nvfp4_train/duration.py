"""How long something lasts in a run: a share of it, steps, or tokens. One value for schedule and precision phases.

No torch here. Arithmetic is exact (a share of 0.07 of 100 steps is 7 steps, not 8 by a last bit of a float).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from nvfp4_train.config import ConfigError

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_TEXT = re.compile(
    r"(?P<number>\d+(?:\.\d+)?(?:e\d+)?)\s*(?P<suffix>[KMBT]?)\s+(?P<unit>steps?|tokens?)", re.IGNORECASE
)
_ADVICE = "Write a share of the run below 1 (0.82), a number of steps (500), or a text such as '8.2T tokens'."


@dataclass(frozen=True)
class Duration:
    """A length of training. `unit` is share (of the run), steps or tokens."""

    amount: Fraction
    unit: str

    @classmethod
    def parse(cls, value: float | int | str) -> Duration:
        """Read what a configuration holds: a number below 1 is a share, others count steps, a text names its unit.

        Raises:
            ConfigError: a negative or fractional number of steps, an unknown unit, or anything else.
        """
        if isinstance(value, str):
            return cls._parse_text(value)
        if isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"{value} is no duration. {_ADVICE}")
        amount = Fraction(str(value))  # the decimal that was written, not the nearest binary fraction
        if amount < 1:
            return cls(amount, "share" if amount else "steps")
        if amount.denominator != 1:
            raise ConfigError(f"{value} is neither a share of the run (below 1) nor a whole number of steps. {_ADVICE}")
        return cls(amount, "steps")

    @classmethod
    def _parse_text(cls, value: str) -> Duration:
        found = _TEXT.fullmatch(value.strip())
        if found is None:
            raise ConfigError(f"{value!r} is no duration. {_ADVICE}")
        amount = Fraction(found["number"]) * _SUFFIXES[found["suffix"].upper()]
        if amount.denominator != 1:
            raise ConfigError(f"{value!r} is no whole number of {found['unit']}. {_ADVICE}")
        return cls(amount, found["unit"].lower().rstrip("s") + "s")

    def steps(self, total_steps: int, tokens_per_step: int) -> int:
        """Whole optimizer steps of a run of `total_steps`, rounded up. May exceed `total_steps`; 0 for 0 alone."""
        assert total_steps > 0, f"a run of {total_steps} steps"
        assert tokens_per_step > 0, f"{tokens_per_step} tokens a step"
        scale = {"share": Fraction(total_steps), "steps": Fraction(1), "tokens": Fraction(1, tokens_per_step)}[
            self.unit
        ]
        return math.ceil(self.amount * scale)

    def __str__(self) -> str:
        return f"{float(self.amount):g} of the run" if self.unit == "share" else f"{int(self.amount):,} {self.unit}"


def duration_of(key: str, value: float | int | str) -> Duration:
    """`Duration.parse` of the value at a key, which its ConfigError names."""
    try:
        return Duration.parse(value)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
