"""The learning rate against hand-made values and against Megatron's scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nvfp4_train.config import ConfigError, OptimizerConfig, ScheduleConfig
from nvfp4_train.schedule import Schedule, build_schedule


def schedule(style: str = "linear", warmup: float | str = 10, decay: float | str = 0.2) -> Schedule:
    return build_schedule(ScheduleConfig(warmup, decay, style, 0.01), OptimizerConfig(lr=2.0), 100, 1000)


def test_warm_up_stable_decay() -> None:
    at = schedule().at
    assert [at(1), at(5), at(10)] == [0.2, 1.0, 2.0]
    assert at(11) == at(50) == at(80) == 2.0
    assert at(90) == pytest.approx(2.0 - 0.5 * 1.98, abs=1e-15)
    assert at(100) == pytest.approx(0.02, abs=1e-15)


def test_no_warm_up_starts_at_the_held_rate() -> None:
    assert schedule(warmup=0).at(1) == 2.0


def test_durations_in_tokens() -> None:
    resolved = schedule(warmup="20K tokens", decay="3K tokens")
    assert (resolved.warmup, resolved.decay) == (20, 3)


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential", "minus_sqrt"])
def test_equal_to_megatron_at_every_step(style: str) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group: dict[str, float] = {}
    theirs = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),  # type: ignore[arg-type]
        init_lr=0.0, max_lr=2.0, min_lr=0.02, lr_warmup_steps=10, lr_decay_steps=100, lr_decay_style="WSD",
        start_wd=0.0, end_wd=0.0, wd_incr_steps=0, wd_incr_style="constant",
        wsd_decay_steps=20, lr_wsd_decay_style=style,
    )  # fmt: skip
    ours = schedule(style)
    for step in range(1, 101):
        theirs.step(1)
        assert ours.at(step) == pytest.approx(group["lr"], rel=1e-12, abs=1e-15), step


def test_shares_of_a_short_run_never_exceed_it() -> None:
    short = build_schedule(ScheduleConfig(0.1, 0.2), OptimizerConfig(lr=2.0), 1, 1000)
    assert (short.warmup, short.decay, short.at(1)) == (1, 0, 2.0)


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"warmup is 90 steps and schedule\.decay 20"):
        schedule(warmup=90)
    with pytest.raises(ConfigError, match="'square'"):
        schedule("square")
