"""What the kept runs say: gaps with bands, tokens to match, before the learning rate decays and at the end.

Gap: of the training loss over the last 10% of the tokens to that of another row with the same seed and batches, in
percent (`comparison.gap`). Seeds differ by little and are few, so how far they scatter is taken from all rows together:
the variance of a gap between two seeds is pooled over the rows, and a band is the mean of a row's seeds plus and minus
Student's t of the pooled degrees of freedom times the pooled spread over the root of its seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nvfp4_train.comparison.gap import CONFIDENCE, Gap, align, t_quantile, window_gap
from nvfp4_train.comparison.match import tokens_to_match
from nvfp4_train.comparison.pairing import unpaired_reasons
from nvfp4_train.comparison.runs import CompareError, Curve, Run
from tests.benchmarks.study import times
from tests.benchmarks.study.cells import BASELINE
from tests.benchmarks.study.store import Record, Store, newest_setup

HOLD = 0.8  # of the tokens: then the learning rate begins to decay (configs/schedule/wsd.yaml)


@dataclass(frozen=True)
class Spread:
    """Standard deviation of a gap from seed to seed, and from how many degrees of freedom it is known."""

    deviation: float
    freedom: int

    def band(self, values: Sequence[float]) -> Gap:
        """The mean of some seeds with its band; without a band where nothing is known of the spread."""
        mean = float(np.mean(values))
        if not self.freedom:
            return Gap(mean)
        half = t_quantile(self.freedom) * self.deviation / math.sqrt(len(values))
        return Gap(mean, mean - half, mean + half)


def pooled(groups: Iterable[Sequence[float]]) -> Spread:
    """The spread within groups of values, over all groups together."""
    several = [np.asarray(group) for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in several)
    return Spread(math.sqrt(squares / freedom) if freedom else 0.0, freedom)


@dataclass(frozen=True)
class Table:
    """The runs of one table that share a set-up.

    Attributes:
        name, setup: of the table.
        records: by row, and by seed in it.
        runs: of the records, in the same places.
        step_ratios: step time of a row over that of the baseline, where it was measured.
    """

    name: str
    setup: str
    records: dict[str, dict[int, Record]]
    runs: dict[str, dict[int, Run]]
    step_ratios: dict[str, float]

    @property
    def rows(self) -> list[str]:
        """Rows that have a run, in the order in which they were trained."""
        return list(self.runs)

    def pairs(self, row: str, baseline: str) -> list[tuple[Run, Run]]:
        """(baseline, row) of each seed that both have, where neither diverged. Raises CompareError for an unpaired one.

        A row that diverged with a seed has no pair there; `diverged` says so.
        """
        shared = sorted(self.runs.get(row, {}).keys() & self.runs.get(baseline, {}).keys())
        found = [(self.runs[baseline][seed], self.runs[row][seed]) for seed in shared]
        whole = [pair for pair in found if all(math.isfinite(run.train.losses[-1]) for run in pair)]
        for pair in whole:
            reasons = unpaired_reasons(*pair)
            if reasons:
                raise CompareError(f"{pair[1].name} is not paired with {pair[0].name}: {'; '.join(reasons)}")
        return whole

    def diverged(self, row: str) -> list[int]:
        """Seeds with which a row ended in values that are not finite."""
        return [seed for seed, found in self.records.get(row, {}).items() if not math.isfinite(found.train_loss)]

    def gaps(self, row: str, baseline: str = BASELINE, until: float = 1.0) -> list[float]:
        """Percent, a value a seed: over the last 10% of the first `until` of the tokens."""
        return [
            window_gap(align(_first(one.train, until), _first(other.train, until))).value
            for one, other in self.pairs(row, baseline)
        ]

    @cached_property
    def spread(self) -> Spread:
        """Of gaps to the baseline, over all rows."""
        return pooled(self.gaps(row) for row in self.rows if row != BASELINE)

    def gap(self, row: str, baseline: str = BASELINE) -> Gap | None:
        """Gap with its band; None without a seed in common, infinite where one of the two diverged."""
        sides = bool(self.diverged(row)) - bool(self.diverged(baseline))
        if sides:
            return Gap(sides * math.inf, sides * math.inf, sides * math.inf)
        values = self.gaps(row, baseline)
        if not values:
            return None
        return (self.spread if baseline == BASELINE else self.spread_to(baseline)).band(values)

    def spread_to(self, baseline: str) -> Spread:
        """Of gaps to another row than the baseline."""
        return pooled(self.gaps(row, baseline) for row in self.rows if row != baseline)

    def hold_gap(self, row: str, baseline: str) -> Gap | None:
        """The gap before the learning rate decays."""
        values = self.gaps(row, baseline, HOLD)
        spread = pooled(self.gaps(name, baseline, HOLD) for name in self.rows if name != baseline)
        return spread.band(values) if values else None

    def seed_deviation(self, row: str) -> Gap | None:
        """Standard deviation of the validation loss from seed to seed, in nats, with its band by the chi-squared
        distribution, exact for three seeds; without a band for another number of them.
        """
        losses = [one.val_loss for one in self.records[row].values() if math.isfinite(one.val_loss)]
        if len(losses) < 2:
            return None
        deviation = float(np.std(losses, ddof=1))
        if len(losses) != 3:
            return Gap(deviation)
        tail = (1 - CONFIDENCE) / 2
        low, high = (math.sqrt(2 / (-2 * math.log(share))) for share in (tail, 1 - tail))
        return Gap(deviation, low * deviation, high * deviation)

    def zeros(self, row: str) -> Gap | None:
        """Percent of a row's weight gradients that are exact zeros at the end, with the spread of all rows' seeds."""
        by_row = {name: [100 * one.zeros for one in found.values()] for name, found in self.records.items()}
        known = {name: values for name, values in by_row.items() if all(map(math.isfinite, values))}
        return pooled(known.values()).band(known[row]) if row in known else None

    def growth(self, row: str, baseline: str) -> Gap | None:
        """Points by which the gap is larger at the end than before the learning rate decays."""

        def growths(name: str) -> list[float]:
            ends, holds = self.gaps(name, baseline), self.gaps(name, baseline, HOLD)
            return [end - hold for end, hold in zip(ends, holds, strict=True)]

        values = growths(row)
        return pooled(growths(name) for name in self.rows if name != baseline).band(values) if values else None

    def match(self, row: str, baseline: str) -> Gap | None:
        """Times the baseline's tokens that a row needs for the baseline's loss: geometric mean over seeds, with the
        band of their spread; None where a seed does not reach it or there is none.
        """
        factors = [tokens_to_match(one.train, other.train).factor for one, other in self.pairs(row, baseline)]
        if not factors or any(factor is None for factor in factors):
            return None
        logs = [math.log(factor) for factor in factors if factor is not None]
        band = pooled([logs]).band(logs)
        low, high = (None if end is None else math.exp(end) for end in (band.low, band.high))
        return Gap(math.exp(band.value), low, high)


def _first(curve: Curve, share: float) -> Curve:
    """The beginning of a curve, up to a share of its tokens, one step at the least."""
    kept = curve.tokens <= max(share * curve.tokens[-1], curve.tokens[0])
    return Curve(curve.steps[kept], curve.tokens[kept], curve.losses[kept])


def read_table(store: Store, name: str) -> Table | None:
    """A table of the kept runs; None without one. Of several set-ups, the one with most runs."""
    every = store.records()
    setup = newest_setup(every, name)
    if setup is None:
        return None
    records: dict[str, dict[int, Record]] = {}
    for one in every:
        if (one.table, one.setup) == (name, setup):
            records.setdefault(one.row, {})[one.seed] = one
    runs = {row: {seed: store.run(one) for seed, one in by_seed.items()} for row, by_seed in records.items()}
    ratios = {row: ratio for row, (_, ratio) in times.read(store.folder).items()}
    return Table(name, setup, records, runs, ratios)
