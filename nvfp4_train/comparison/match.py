"""Smooth curves, and how many more tokens the worse of two runs needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nvfp4_train.comparison.runs import Curve

REACH = 0.1


def smooth(curve: Curve) -> NDArray[np.float64]:
    """The finite losses of `curve`, smoothed: at every point a straight line is fitted to the losses within 5% of its
    tokens.

    The window grows with the tokens, as the scale on which the loss changes does. A line, unlike an average, is not
    biased at the last point, where only one side of the window is there. Fewer than four points in a window: the loss
    itself.
    """
    curve = curve.finite()
    if not len(curve):
        return curve.losses
    place = curve.tokens / float(curve.tokens[-1])
    first = np.searchsorted(place, place * (1 - REACH), side="left")
    last = np.searchsorted(place, place * (1 + REACH), side="right")

    def window_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
        total = np.concatenate([[0.0], np.cumsum(values)])
        return total[last] - total[first]

    level = float(curve.losses.mean())  # sums of small numbers lose fewer digits
    count = (last - first).astype(float)
    mean_x, mean_y = window_sums(place) / count, window_sums(curve.losses - level) / count
    variance = window_sums(place**2) / count - mean_x**2
    covariance = window_sums(place * (curve.losses - level)) / count - mean_x * mean_y
    enough = (count >= 4) & (variance > 0)
    slope = np.divide(covariance, variance, out=np.zeros_like(variance), where=enough)
    return np.where(enough, level + mean_y + slope * (place - mean_x), curve.losses)


@dataclass(frozen=True)
class Match:
    """Tokens the run needs over the baseline's for the same loss, above 1 where the run is worse; None and why not."""

    factor: float | None
    reason: str = ""


def tokens_to_match(baseline: Curve, run: Curve) -> Match:
    """How many times the baseline's tokens the run needs, read off the smoothed curves where they pass one loss.

    A worse run: its tokens over those at which the baseline passed the run's final loss. A better run: the tokens at
    which it passed the baseline's final loss, over the baseline's. 'Not reached' where the other curve never stood
    above that loss.
    """
    baseline, run = baseline.finite(), run.finite()
    smooth_baseline, smooth_run = smooth(baseline), smooth(run)
    if smooth_run[-1] >= smooth_baseline[-1]:
        passed = _last_passed(baseline.tokens, smooth_baseline, float(smooth_run[-1]))
        whose, level, factor = "baseline", smooth_run[-1], float(run.tokens[-1]) / passed if passed else None
    else:
        passed = _last_passed(run.tokens, smooth_run, float(smooth_baseline[-1]))
        whose, level, factor = "run", smooth_baseline[-1], passed / float(baseline.tokens[-1]) if passed else None
    if factor is None:
        return Match(
            None,
            f"not reached: the {whose} logged no loss above {level:.4f}, so there is nothing to interpolate between",
        )
    return Match(factor)


def _last_passed(tokens: NDArray[np.int64], losses: NDArray[np.float64], level: float) -> float | None:
    """The last tokens at which a curve that ends at or below `level` stood at it; None where it never stood above."""
    if losses[-1] == level:
        return float(tokens[-1])
    above = np.flatnonzero(losses >= level)
    if not len(above):
        return None
    i = int(above[-1])
    share = (losses[i] - level) / (losses[i] - losses[i + 1])
    return float(tokens[i] + share * (tokens[i + 1] - tokens[i]))
