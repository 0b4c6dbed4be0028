"""The gap and its band, on curves whose true gap is known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from nvfp4_train.comparison.gap import (
    Aligned,
    Gap,
    align,
    gap_curve,
    half_width,
    seeds_gap,
    t_quantile,
    window_gap,
    window_start,
)
from nvfp4_train.comparison.runs import Curve
from tests.comparison.synthetic import TOKENS_PER_STEP, losses, true_loss

SEEDS = range(100)


def curve(values: NDArray[np.float64], tokens_per_step: int = TOKENS_PER_STEP) -> Curve:
    steps = np.arange(1, len(values) + 1)
    return Curve(steps, steps * tokens_per_step, np.asarray(values, dtype=float))


def pair_gap(seed: int, gap: float, *, paired: bool = True, steps: int = 2000, deviation: float, memory: float) -> Gap:
    """The measured gap of two runs whose difference has own noise of standard deviation `deviation`."""
    own = {"own_noise": deviation / np.sqrt(2), "memory": memory, "steps": steps}
    baseline = losses(batch_seed=seed, own_seed=2 * seed, **own)
    run = losses(batch_seed=seed if paired else seed + 1000, own_seed=2 * seed + 1, gap=gap, **own)
    return window_gap(align(curve(baseline), curve(run)))


def inside(gaps: list[Gap], truth: float) -> int:
    return sum(gap.low is not None and gap.high is not None and gap.low <= truth <= gap.high for gap in gaps)


def mean_half_width(gaps: list[Gap]) -> float:
    return float(np.mean([gap.half_width for gap in gaps]))


@pytest.mark.parametrize("truth", [0.1, 0.2, 1.0])
@pytest.mark.parametrize(("deviation", "memory"), [(0.004, 0.5), (0.003, 0.7), (0.002, 0.9)])
def test_band_holds_known_gaps_in_noise_of_real_runs(truth: float, deviation: float, memory: float) -> None:
    """2000 steps, batches of .03 nats, the paired difference's own AR(1) noise of .002 to .004 nats: half-width .05."""
    gaps = [pair_gap(seed, truth, deviation=deviation, memory=memory) for seed in SEEDS]
    assert inside(gaps, truth) >= 90
    assert mean_half_width(gaps) <= 0.05


def test_band_is_no_wider_than_it_must_be() -> None:
    """Independent noise of .002 nats over 200 steps: the band of textbooks is 1.97 * .002 / sqrt(200) nats."""
    gaps = [pair_gap(seed, 0.2, deviation=0.002, memory=0.0) for seed in SEEDS]
    base = float(true_loss(TOKENS_PER_STEP * np.arange(1801, 2001)).mean())
    textbook = 100 * 1.97 * 0.002 / np.sqrt(200) / base
    assert mean_half_width(gaps) == pytest.approx(textbook, rel=0.15)


def test_band_holds_the_mean_of_a_gap_that_drifts() -> None:
    drift = np.linspace(0.2, 1.2, 2000)
    loss = true_loss(TOKENS_PER_STEP * np.arange(1, 2001))
    truth = 100 * float((drift * loss / 100)[-200:].mean() / loss[-200:].mean())
    gaps = []
    for seed in SEEDS:
        baseline = losses(batch_seed=seed, own_seed=2 * seed)
        run = losses(batch_seed=seed, own_seed=2 * seed + 1) + drift * loss / 100
        gaps.append(window_gap(align(curve(baseline), curve(run))))
    assert inside(gaps, truth) >= 90
    assert mean_half_width(gaps) <= 0.07  # .003 nats for each run


def test_unpaired_band_holds_the_gap_too_and_is_wider() -> None:
    paired = [pair_gap(seed, 0.2, deviation=0.003, memory=0.5) for seed in SEEDS]
    unpaired = [pair_gap(seed, 0.2, paired=False, deviation=0.003, memory=0.5) for seed in SEEDS]
    assert inside(unpaired, 0.2) >= 90
    assert mean_half_width(unpaired) > 5 * mean_half_width(paired)


@pytest.mark.parametrize("steps", [100, 300])
def test_band_of_a_short_run(steps: int) -> None:
    gaps = [pair_gap(seed, 1.0, steps=steps, deviation=0.003, memory=0.5) for seed in SEEDS]
    assert inside(gaps, 1.0) >= 90


def test_value_is_the_relative_difference_of_the_means_of_the_window() -> None:
    baseline = np.full(100, 2.0)
    run = np.full(100, 9.0)
    run[-10:] = 2.5
    gap = window_gap(align(curve(baseline), curve(run)))
    assert gap.value == pytest.approx(25.0)


def test_gap_as_text() -> None:
    assert str(Gap(1.0, 0.8, 1.2)) == "+1.00 ± 0.20"
    assert str(Gap(-0.2, -0.204, -0.196)) == "-0.200 ± 0.004"
    assert str(Gap(0.5)) == "+0.50"


def test_a_run_against_itself_has_no_gap_and_no_band() -> None:
    same = curve(losses())
    assert window_gap(align(same, same)) == Gap(0.0, 0.0, 0.0)


def test_half_width_against_a_plain_loop() -> None:
    rng = np.random.default_rng(3)
    noise = rng.standard_normal(400) + 0.05 * np.arange(400)
    slope, level = np.polyfit(np.arange(400), noise, 1)
    residual = noise - level - slope * np.arange(400)
    powers = []
    for frequency in range(2, 12):  # isqrt(400) // 2 = 10 cosines
        wave = [np.cos(np.pi * frequency * (i + 0.5) / 400) for i in range(400)]
        powers.append(2 / 400 * sum(r * w for r, w in zip(residual, wave, strict=True)) ** 2)
    expected = 2.2281 * np.sqrt(np.mean(powers) / 200)
    noise_before = np.concatenate([100 * rng.standard_normal(600), noise])  # beyond what is judged
    assert half_width(noise_before, 200) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("points", [1, 2, 3, 4])
def test_too_few_points_have_no_band(points: int) -> None:
    assert half_width(np.arange(points, dtype=float), 1) is None


def test_window_is_the_last_tenth_of_the_tokens() -> None:
    assert window_start(TOKENS_PER_STEP * np.arange(1, 2001)) == 1800
    assert window_start(np.array([10, 90, 91, 100])) == 2
    assert window_start(np.array([7])) == 0


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423)]
)
def test_t_quantile(freedom: int, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, rel=8e-3)


def test_seeds_have_the_band_of_their_spread() -> None:
    gap = seeds_gap([Gap(1.0, 0.9, 1.1), Gap(2.0), Gap(3.0)])
    half = 4.3027 * 1.0 / np.sqrt(3)
    assert (gap.value, gap.half_width) == (2.0, pytest.approx(half, rel=1e-4))
    assert seeds_gap([Gap(1.0, 0.9, 1.1)]) == Gap(1.0, 0.9, 1.1)


def test_the_band_of_seeds_holds_a_recipe_where_that_of_a_pair_does_not() -> None:
    """Gaps that scatter by .6 points from seed to seed, as runs of 10M parameters have them; pairs are known to .06."""
    rng = np.random.default_rng(0)
    held = {"seeds": 0, "pair": 0}
    for _ in range(400):
        pairs = [
            pair_gap(int(seed), 1.0 + 0.6 * rng.standard_normal(), steps=300, deviation=0.003, memory=0.0)
            for seed in rng.integers(0, 2**31, 3)
        ]
        held["seeds"] += inside([seeds_gap(pairs)], 1.0)
        held["pair"] += inside(pairs[:1], 1.0)
    assert 0.92 * 400 <= held["seeds"] <= 0.98 * 400
    assert held["pair"] < 0.2 * 400


def test_align_takes_shared_tokens_and_leaves_out_what_is_not_finite() -> None:
    baseline = Curve(np.array([1, 2, 3, 4]), np.array([10, 20, 30, 40]), np.array([4.0, 3.0, np.nan, 2.0]))
    run = Curve(np.array([2, 3, 4, 5]), np.array([20, 30, 40, 50]), np.array([3.5, 3.0, 2.5, 2.0]))
    aligned = align(baseline, run)
    assert aligned.tokens.tolist() == [20, 40]
    assert aligned.baseline.tolist() == [3.0, 2.0]
    assert aligned.run.tolist() == [3.5, 2.5]


def test_align_does_not_interpolate_over_steps_that_one_run_skipped() -> None:
    tokens = np.arange(10, 70, 10)
    baseline = Curve(tokens // 10, tokens, np.array([6.0, 5.0, np.nan, 3.0, 2.0, 1.0]))
    run = Curve(tokens // 10, tokens, np.array([6.0, 5.0, 4.0, np.nan, 2.0, 1.0]))
    assert align(baseline, run).tokens.tolist() == [10, 20, 50, 60]


def test_align_interpolates_where_steps_differ() -> None:
    fine = Curve(np.arange(1, 10), np.arange(1, 10) * 10, np.arange(90.0, 0.0, -10.0))
    coarse = Curve(np.arange(1, 4), np.array([15, 45, 200]), np.array([1.0, 2.0, 3.0]))
    for first, second in ((fine, coarse), (coarse, fine)):
        aligned = align(first, second)
        assert aligned.tokens.tolist() == [15, 45]
    assert aligned.baseline.tolist() == [1.0, 2.0]
    assert aligned.run.tolist() == [85.0, 55.0]


def test_gap_of_runs_with_other_batch_sizes_is_that_of_equal_tokens() -> None:
    baseline = curve(true_loss(4096 * np.arange(1, 2001)))
    run = curve(1.01 * true_loss(6000 * np.arange(1, 1400)), 6000)
    gap = window_gap(align(baseline, run))
    assert gap.value == pytest.approx(1.0, abs=1e-3)


def test_align_of_runs_without_common_tokens_is_empty() -> None:
    early = Curve(np.array([1, 2]), np.array([10, 20]), np.array([4.0, 3.0]))
    late = Curve(np.array([3, 4]), np.array([30, 40]), np.array([4.0, 3.0]))
    empty = Curve(np.array([], dtype=int), np.array([], dtype=int), np.array([]))
    assert len(align(early, late)) == len(align(early, empty)) == len(align(empty, empty)) == 0


def test_gap_curve_ends_with_the_gap_of_the_run() -> None:
    aligned = align(curve(losses(own_seed=1)), curve(losses(own_seed=2, gap=1.0)))
    tokens, gaps = gap_curve(aligned)
    assert tokens[-1] == 2000 * TOKENS_PER_STEP
    assert gaps[-1] == window_gap(aligned)
    half = Aligned(aligned.tokens[:1000], aligned.baseline[:1000], aligned.run[:1000])
    middle = int(np.argmin(np.abs(tokens - 1000 * TOKENS_PER_STEP)))
    assert gaps[middle].value == pytest.approx(window_gap(half).value, abs=0.05)


def test_gap_curve_of_a_short_run() -> None:
    tokens, gaps = gap_curve(align(curve(np.full(3, 2.0)), curve(np.full(3, 2.2))))
    assert tokens.tolist() == [4096, 8192, 12288]
    assert [gap.value for gap in gaps] == pytest.approx([10.0, 10.0, 10.0])
