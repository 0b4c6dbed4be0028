"""Smooth curves, and how many more tokens the worse of two runs needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nvfp4_train.comparison.runs import Curve

REACH = 0.1


def smooth(curve: Curve) -> NDArray[np.float64]:
    """The finite losses of `curve`, smoothed: at every point a straight line is fitted to the losses within 10% of its
    tokens, before and after.

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

    Which of the two is worse is said where the shorter one ends. The worse one's tokens are those at which it reaches
    the better one's final loss, if it goes on for as long as that takes; else those at its end, against those at which
    the better one passed its final loss. 'Not reached' where the better one never stood above that loss.

    Two runs of one loss have a factor of 1, even if one of them is shorter or skipped a step: how far apart they are is
    taken from both up to the end of the shorter one, where the noise of batches that both saw is the same, and a single
    curve is read from there.
    """
    baseline, run = _finite_in_both(baseline, run)
    end = int(min(baseline.tokens[-1], run.tokens[-1]))
    apart = float(smooth(_until(run, end))[-1] - smooth(_until(baseline, end))[-1])
    if apart >= 0:
        return _more_tokens(baseline, run, end, apart, "baseline")
    match = _more_tokens(run, baseline, end, -apart, "run")
    return match if match.factor is None else Match(1 / match.factor)


def _more_tokens(better: Curve, worse: Curve, end: int, apart: float, better_name: str) -> Match:
    """Tokens of the worse curve over those of the better one for the same loss; they are `apart` at `end` tokens."""
    smooth_better, smooth_worse = smooth(better), smooth(worse)
    better_there = float(np.interp(end, better.tokens, smooth_better))
    goal = float(np.interp(end, worse.tokens, smooth_worse)) - apart
    reached = _first_reached(worse.tokens, smooth_worse, goal, end)
    if reached is not None:
        return Match(reached / end)
    level = better_there + float(smooth_worse[-1]) - goal
    before = better.tokens < end
    tokens, losses = np.append(better.tokens[before], end), np.append(smooth_better[before], better_there)
    passed = _last_passed(tokens, losses, level)
    if passed is None:
        return Match(
            None,
            f"not reached: the {better_name} logged no loss above {level:.4f}, so there is nothing to interpolate "
            "between",
        )
    return Match(float(worse.tokens[-1]) / passed)


def _first_reached(tokens: NDArray[np.int64], losses: NDArray[np.float64], level: float, start: int) -> float | None:
    """The first tokens from `start` on at which a curve is at or below `level`."""
    below = np.flatnonzero((tokens >= start) & (losses <= level))
    if not len(below):
        return None
    i = int(below[0])
    if i == 0 or losses[i - 1] <= level:
        return float(tokens[i])
    share = (losses[i - 1] - level) / (losses[i - 1] - losses[i])
    return max(float(start), float(tokens[i - 1] + share * (tokens[i] - tokens[i - 1])))


def _finite_in_both(one: Curve, other: Curve) -> tuple[Curve, Curve]:
    """Both without the points at which either has no finite loss: a step that one run skipped is left out of both."""
    left_out = np.concatenate([curve.tokens[~np.isfinite(curve.losses)] for curve in (one, other)])
    return _points(one, ~np.isin(one.tokens, left_out)), _points(other, ~np.isin(other.tokens, left_out))


def _until(curve: Curve, end: int) -> Curve:
    return _points(curve, curve.tokens <= end)


def _points(curve: Curve, kept: NDArray[np.bool_]) -> Curve:
    return Curve(curve.steps[kept], curve.tokens[kept], curve.losses[kept])


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
