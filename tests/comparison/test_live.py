"""The gap during a run: what the comparison would say of the run until then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nvfp4_train.comparison.gap import align, window_gap
from nvfp4_train.comparison.live import LiveGap
from nvfp4_train.comparison.runs import open_run
from tests.comparison.synthetic import TOKENS_PER_STEP, config, losses, make_run

STEPS = 300
VAL = dict.fromkeys(range(50, STEPS + 1, 50), 3.0)


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return make_run(tmp_path / "base", losses(steps=STEPS), settings=config(), val=VAL)


@pytest.fixture
def run_losses() -> list[float]:
    return losses(steps=STEPS, own_seed=1, gap=0.7).tolist()


def follow(live: LiveGap, values: list[float], first: int = 1) -> list[dict[str, float]]:
    steps = range(first, first + len(values))
    return [
        live.update(step, step * TOKENS_PER_STEP, loss, 3.06 if step in VAL else None)
        for step, loss in zip(steps, values, strict=True)
    ]


def test_the_last_value_is_what_the_comparison_says(tmp_path: Path, baseline: Path, run_losses: list[float]) -> None:
    found = follow(LiveGap(baseline), run_losses)
    run = open_run(make_run(tmp_path / "run", np.array(run_losses)))
    expected = window_gap(align(open_run(baseline).train, run.train)).value
    assert found[-1]["gap/train"] == pytest.approx(expected, rel=1e-9)
    assert found[-1]["gap/val"] == pytest.approx(2.0)
    assert all("gap/train" in one for one in found)
    assert [step for step, one in enumerate(found, 1) if "gap/val" in one] == list(VAL)


def test_a_step_that_the_baseline_skipped_is_left_out(tmp_path: Path, run_losses: list[float]) -> None:
    skipped = losses(steps=STEPS)
    skipped[[280, 290]] = np.nan
    baseline = make_run(tmp_path / "base", skipped)
    found = follow(LiveGap(baseline), run_losses)
    run = open_run(make_run(tmp_path / "run", np.array(run_losses)))
    expected = window_gap(align(open_run(baseline).train, run.train)).value
    assert found[-1]["gap/train"] == pytest.approx(expected, rel=1e-9)
    assert [step for step, one in enumerate(found) if "gap/train" not in one] == [280, 290]


def test_a_resumed_run_goes_on_as_if_never_interrupted(tmp_path: Path, baseline: Path, run_losses: list[float]) -> None:
    whole = follow(LiveGap(baseline), run_losses)
    val = {step: 3.06 for step in VAL if step <= 170}
    folder = make_run(tmp_path / "run", np.array(run_losses[:170]), val=val)
    live = LiveGap(baseline)
    live.restore(folder)
    assert follow(live, run_losses[170:], first=171) == whole[170:]


def test_a_run_without_metrics_yet_has_nothing_to_restore(tmp_path: Path, baseline: Path) -> None:
    live = LiveGap(baseline)
    live.restore(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    live.restore(tmp_path)
    assert live.update(1, TOKENS_PER_STEP, 6.0) != {}


def test_beyond_the_baseline_and_without_a_finite_loss_there_is_no_gap(baseline: Path) -> None:
    live = LiveGap(baseline)
    assert live.update(1, TOKENS_PER_STEP, float("nan")) == {}
    assert live.update(2, 2 * TOKENS_PER_STEP, None) == {}
    assert set(live.update(3, 3 * TOKENS_PER_STEP, 6.0)) == {"gap/train"}
    assert live.update(STEPS + 1, (STEPS + 1) * TOKENS_PER_STEP, 3.0, 3.0) == {}


def test_other_batch_sizes_are_compared_at_equal_tokens(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "line", np.linspace(4.0, 3.0, 11), tokens_per_step=10)
    assert LiveGap(folder).update(1, 65, 3.45 * 1.02) == {"gap/train": pytest.approx(2.0)}


def test_a_baseline_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run folder"):
        LiveGap(tmp_path)


def test_reasons_against_a_pair(tmp_path: Path, baseline: Path) -> None:
    assert LiveGap(baseline).reasons(config()) == []
    assert LiveGap(baseline).reasons(config(2)) == ["seed differs: 1 and 2"]
    bare = make_run(tmp_path / "bare", np.array([3.0]))
    assert LiveGap(bare).reasons(config()) == ["bare has no config.yaml, so its seed and model are unknown"]
