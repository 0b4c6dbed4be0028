"""Which source each sample of a run comes from: a function of the weights of its phase and of its number alone.

The weights of a phase are whole shares of a period: within it, the j-th of a source's m samples is due at
(2j + 1) / 2m, and samples are read as they fall due (ties go to the source named first). So a source never strays from
its share by more than a few samples, each period is exact, and the source of any sample is found without counting from
the first: Megatron's blended dataset knows one set of weights for a whole run and keeps ten bytes for every sample.

A source's own samples are read in their order, over phases too: what one phase has read, the next does not read again.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

LONGEST_PERIOD = 1 << 20

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Phase:
    """From sample `start` of the run on, each source gives its share. `weights` are in the order of the sources."""

    start: int
    weights: tuple[float, ...]


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Weights as whole samples of a period: exactly where its length is at most LONGEST_PERIOD, else to the nearest."""
    exact = [Fraction(str(weight)) for weight in weights]  # the decimals that were written
    total = sum(exact)
    scale = math.lcm(*(share.denominator for share in exact))
    shares = [int(share * scale) for share in exact]
    common = math.gcd(*shares)
    if sum(shares) // common <= LONGEST_PERIOD:
        return [share // common for share in shares]
    ideal = [share / total * LONGEST_PERIOD for share in exact]
    shares = [max(math.floor(share), int(share > 0)) for share in ideal]
    short = sorted(range(len(shares)), key=lambda i: shares[i] - ideal[i])
    for i in short[: max(0, LONGEST_PERIOD - sum(shares))]:
        shares[i] += 1
    return shares


class _Period:
    """The samples of one period in order: `sources` of each, and `indices`, its place among that source's."""

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares: Counts = np.array(shares, dtype=np.int64)
        sources = np.repeat(np.arange(len(shares)), shares)
        indices = np.concatenate([np.arange(share) for share in shares])
        due = (2 * indices + 1) / self.shares[sources]  # quotients of integers below 2^21 differ by more than rounding
        order = np.lexsort((sources, due))
        self.sources, self.indices = sources[order].astype(np.uint16), indices[order]

    def counts(self, samples: int) -> Counts:
        """How many of the first `samples` each source gives."""
        periods, rest = divmod(samples, len(self.sources))
        return periods * self.shares + np.bincount(self.sources[:rest], minlength=len(self.shares))


class Blend:
    """The samples of a run, as samples of its sources."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        """`phases` in order, the first from sample 0; of two that start at one sample the later counts."""
        assert phases, "a run without a phase"
        assert phases[0].start == 0, f"the first phase starts at sample {phases[0].start}"
        self.phases = tuple(phases)
        self._starts = [phase.start for phase in phases]
        assert self._starts == sorted(self._starts), f"phases out of order: {self._starts}"
        self._periods = [_Period(whole_shares(phase.weights)) for phase in phases]
        self._before: list[Counts] = [np.zeros(len(phases[0].weights), dtype=np.int64)]
        for i in range(1, len(phases)):
            length = self._starts[i] - self._starts[i - 1]
            self._before.append(self._before[-1] + self._periods[i - 1].counts(length))

    def locate(self, sample: int) -> tuple[int, int]:
        """The source of a sample of the run, and its number among the samples of that source."""
        phase = bisect_right(self._starts, sample) - 1
        period = self._periods[phase]
        periods, place = divmod(sample - self._starts[phase], len(period.sources))
        source = int(period.sources[place])
        before = self._before[phase][source] + periods * period.shares[source]
        return source, int(before + period.indices[place])

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` samples of the run come from each source."""
        phase = bisect_right(self._starts, max(0, samples - 1)) - 1
        within = self._periods[phase].counts(samples - self._starts[phase])
        return [int(count) for count in self._before[phase] + within]
