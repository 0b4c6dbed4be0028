"""The relative gap of a run to its baseline, with a 95% band.

Gap = 100 * (mean run loss - mean baseline loss) / mean baseline loss over a window of the last 10% of tokens,
positive where the run is worse. Both runs are read at equal tokens, so the band comes from the noise of their
difference d: in paired runs the noise of the batches, some ten times larger than the rest, cancels in it; in unpaired
runs it does not, and the same formula gives a wider band.

Neighbouring steps are not independent, since weights that wandered off stay off for a while. The variance of the mean
is therefore estimated from the slow part of the noise alone: the average power of its first cosines, with Student's t
(the equal-weighted cosine estimator of Lazarus, Lewis, Stock and Watson, "HAR inference: recommendations for
practice", 2018). A straight line is taken out first and the cosine that is most like it left out, so that a gap that
drifts through the window does not count as noise; the mean over the window stays the estimate.

The band speaks of this pair of runs. How far another seed would land is in it only where several seeds are given:
then it is the spread of their gaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from nvfp4_train.comparison.runs import Curve

FloatArray = NDArray[np.float64]

WINDOW = 0.1
CONFIDENCE = 0.95
NOISE_POINTS = 100
FEWEST_COSINES, MOST_COSINES = 4, 16  # more of them make a narrower band where the noise forgets fast, a false one else
CURVE_POINTS = 100


@dataclass(frozen=True)
class Gap:
    """In percent of the baseline's loss. `low` and `high` are None where too few points tell of the noise."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        """Half of the band, in points of a percent."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def __str__(self) -> str:
        """`+1.08 ± 0.11`, or with a third digit where the band is that narrow."""
        half = self.half_width
        if half is None:
            return f"{self.value:+.2f}"
        digits = 2 if half >= 0.1 else 3
        return f"{self.value:+.{digits}f} ± {half:.{digits}f}"


@dataclass(frozen=True)
class Aligned:
    """Two losses at equal tokens, finite in both: `tokens` int64 [n] increasing, `baseline` and `run` float64 [n]."""

    tokens: NDArray[np.int64]
    baseline: FloatArray
    run: FloatArray

    def __len__(self) -> int:
        return len(self.tokens)


def align(baseline: Curve, run: Curve) -> Aligned:
    """Both curves at equal tokens: at those they share, or, where they share fewer than half, interpolated.

    Interpolation keeps the points of the curve that has fewer of them in the common range, and reads the other one
    there by a straight line between its neighbours. Empty where the curves have no tokens in common.
    """
    baseline, run = baseline.finite(), run.finite()
    common, in_baseline, in_run = np.intersect1d(baseline.tokens, run.tokens, assume_unique=True, return_indices=True)
    if len(common) and 2 * len(common) >= min(len(baseline), len(run)):
        return Aligned(common, baseline.losses[in_baseline], run.losses[in_run])
    if not len(baseline) or not len(run):
        return Aligned(common, np.empty(0), np.empty(0))
    first, last = max(baseline.tokens[0], run.tokens[0]), min(baseline.tokens[-1], run.tokens[-1])
    inside = [curve.tokens[(curve.tokens >= first) & (curve.tokens <= last)] for curve in (baseline, run)]
    grid = min((points for points in inside if len(points)), key=len, default=common)
    return Aligned(grid, *(np.interp(grid, curve.tokens, curve.losses) for curve in (baseline, run)))


def before_window(tokens: int) -> int:
    """The tokens after which the last 10% of `tokens` begin."""
    return tokens - round(WINDOW * tokens)


def window_start(tokens: NDArray[np.int64]) -> int:
    """Index of the first point in the last 10% of the tokens. Needs at least one point."""
    return int(np.searchsorted(tokens, before_window(int(tokens[-1])), side="right"))


def window_gap(aligned: Aligned) -> Gap:
    """The gap over the last 10% of the aligned tokens. Needs at least one point."""
    count = len(aligned) - window_start(aligned.tokens)
    base = float(aligned.baseline[-count:].mean())
    differences = aligned.run - aligned.baseline
    value = 100 * float(differences[-count:].mean()) / base
    half = half_width(differences, count)
    if half is None:
        return Gap(value)
    return Gap(value, value - 100 * half / base, value + 100 * half / base)


def half_width(differences: FloatArray, count: int) -> float | None:
    """Half of the 95% band of the mean of the last `count` differences, in their unit.

    The noise is judged from twice as many points as the mean, or from 100 where that is more, but from half of the
    run at most. None where that leaves fewer than three.
    """
    points = max(count, min(max(2 * count, NOISE_POINTS), (len(differences) + 1) // 2))
    if points < 3:
        return None
    noise = differences[-points:]
    centred = np.arange(points) - (points - 1) / 2
    noise = noise - noise.mean() - centred * (centred @ noise) / (centred @ centred)
    cosines = min(points - 2, MOST_COSINES, max(FEWEST_COSINES, math.isqrt(points) // 2))
    frequencies = np.arange(2, cosines + 2)[:, None]
    basis = math.sqrt(2 / points) * np.cos(np.pi * frequencies * (np.arange(points) + 0.5) / points)
    power = float(np.mean((basis @ noise) ** 2))
    return t_quantile(cosines) * math.sqrt(power / count)


def seeds_gap(gaps: list[Gap]) -> Gap:
    """The mean gap of several seeds, with the band of their spread; a single seed keeps its own."""
    if len(gaps) == 1:
        return gaps[0]
    values = np.array([gap.value for gap in gaps])
    half = t_quantile(len(gaps) - 1) * float(values.std(ddof=1)) / math.sqrt(len(gaps))
    mean = float(values.mean())
    return Gap(mean, mean - half, mean + half)


def t_quantile(freedom: int) -> float:
    """Student's t at 97.5%: exact at 1 and 2 degrees of freedom, above within .8% (Cornish and Fisher)."""
    tail = 0.5 + CONFIDENCE / 2
    if freedom == 1:
        return math.tan(math.pi * (tail - 0.5))
    if freedom == 2:
        return (2 * tail - 1) * math.sqrt(2 / (4 * tail * (1 - tail)))
    z = NormalDist().inv_cdf(tail)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def gap_curve(aligned: Aligned) -> tuple[FloatArray, list[Gap]]:
    """The gap along the run: at up to 100 places, what `window_gap` says of the run until there. Tokens and gaps."""
    places = np.unique(np.linspace(0, len(aligned) - 1, CURVE_POINTS).round().astype(int))
    gaps = [
        window_gap(Aligned(aligned.tokens[: i + 1], aligned.baseline[: i + 1], aligned.run[: i + 1])) for i in places
    ]
    return aligned.tokens[places].astype(float), gaps
