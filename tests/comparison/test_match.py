"""Smoothing and tokens to match, on curves where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from nvfp4_train.comparison.match import smooth, tokens_to_match
from nvfp4_train.comparison.runs import Curve

TOKENS = 1000 * np.arange(1, 2001)


def power_law(tokens: NDArray[np.int64] = TOKENS, factor: float = 1.0) -> NDArray[np.float64]:
    """Loss that needs `factor` times the tokens for the same value."""
    return 2.0 + 30.0 * (tokens / factor) ** -0.25


def curve(values: NDArray[np.float64], tokens: NDArray[np.int64] = TOKENS) -> Curve:
    return Curve(np.arange(1, len(values) + 1), tokens, values)


def test_worse_and_better_runs_are_mirrored() -> None:
    baseline, worse = curve(power_law()), curve(power_law(factor=1.36))
    assert tokens_to_match(baseline, worse).factor == pytest.approx(1.36, rel=5e-3)
    assert tokens_to_match(worse, baseline).factor == pytest.approx(1 / 1.36, rel=5e-3)


def test_equal_runs_match_at_once() -> None:
    same = curve(power_law())
    assert tokens_to_match(same, same).factor == 1.0


def test_paired_noise_of_batches_moves_the_factor_little() -> None:
    factors = []
    for seed in range(20):
        noise = 0.03 * np.random.default_rng(seed).standard_normal(len(TOKENS))
        factors.append(
            tokens_to_match(curve(power_law() + noise), curve(power_law(factor=1.36) + noise)).factor or np.nan
        )
    assert np.mean(factors) == pytest.approx(1.36, abs=0.02)
    assert np.std(factors) < 0.05


def test_a_longer_run_that_catches_up() -> None:
    long = 1000 * np.arange(1, 4001)
    baseline, run = curve(power_law()), curve(power_law(long, factor=1.5), long)
    assert tokens_to_match(baseline, run).factor == pytest.approx(1.5, rel=5e-3)


def test_a_run_shorter_than_the_baseline() -> None:
    short = TOKENS[:1000]
    assert tokens_to_match(curve(power_law()), curve(power_law(short, 1.2), short)).factor == pytest.approx(
        1.2, rel=5e-3
    )
    assert tokens_to_match(curve(power_law()), curve(power_law(short, 0.8), short)).factor == pytest.approx(
        0.8, rel=5e-3
    )


@pytest.mark.parametrize("length", [1000, 1500, 1999])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_same_curve_cut_short_has_a_factor_of_one(length: int, seed: int) -> None:
    """The end of the shorter one is smoothed from one side: where the noise points up or down there, in both."""
    noisy = power_law() + 0.1 * np.random.default_rng(seed).standard_normal(len(TOKENS))
    whole, short = curve(noisy), curve(noisy[:length], TOKENS[:length])
    assert tokens_to_match(whole, short).factor == 1.0
    assert tokens_to_match(short, whole).factor == 1.0


def test_a_step_that_one_run_skipped_is_left_out_of_both() -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(len(TOKENS))
    noise[-40:-20] = 2.0
    skipped = np.where(noise == 2.0, np.nan, power_law() + noise)
    assert tokens_to_match(curve(power_law() + noise), curve(skipped)).factor == 1.0


def test_a_longer_run_that_does_not_catch_up() -> None:
    long = 1000 * np.arange(1, 2501)
    assert tokens_to_match(curve(power_law()), curve(power_law(long, 1.5), long)).factor == pytest.approx(1.5, rel=1e-2)
    assert tokens_to_match(curve(power_law(long, 1.5), long), curve(power_law())).factor == pytest.approx(
        1 / 1.5, rel=1e-2
    )


def test_not_reached_is_said() -> None:
    baseline, hopeless = curve(power_law()), curve(np.full(len(TOKENS), 9.0))
    found = tokens_to_match(baseline, hopeless)
    assert found.factor is None
    assert "not reached: the baseline logged no loss above 9.0000" in found.reason
    found = tokens_to_match(hopeless, curve(np.full(len(TOKENS), 2.0)))
    assert found.factor is None
    assert "not reached: the run logged no loss above 9.0000" in found.reason


def test_smoothing_keeps_straight_lines_to_their_ends() -> None:
    line = 5.0 - 1e-6 * TOKENS
    assert smooth(curve(line)) == pytest.approx(line, abs=1e-9)


def test_smoothing_averages_noise_within_a_tenth_of_the_tokens() -> None:
    """In the middle, 2 * 100 of 1000 steps around step 1000 make the mean; a line adds nothing there."""
    values = [smooth(curve(np.random.default_rng(seed).standard_normal(len(TOKENS))))[999] for seed in range(300)]
    assert np.std(values) == pytest.approx(1 / np.sqrt(201), rel=0.12)


def test_smoothing_leaves_few_points_alone_and_drops_what_is_not_finite() -> None:
    assert smooth(curve(np.array([3.0, np.nan, 2.0, 1.0]), TOKENS[:4])).tolist() == [3.0, 2.0, 1.0]
    close = np.array([100, 101, 102, 103])
    zigzag = np.array([1.0, 3.0, 2.0, 4.0])
    assert smooth(curve(zigzag[:3], close[:3])).tolist() == [1.0, 3.0, 2.0]
    assert smooth(curve(zigzag, close)) == pytest.approx([1.3, 2.1, 2.9, 3.7])
    assert len(smooth(curve(np.array([np.nan]), TOKENS[:1]))) == 0
