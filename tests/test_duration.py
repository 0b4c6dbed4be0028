"""Durations: shares, steps and tokens, resolved exactly."""

from __future__ import annotations

import pytest

from nvfp4_train.config import ConfigError
from nvfp4_train.duration import Duration


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        (0, 0),
        (0.0, 0),
        (0.82, 820),
        (0.07, 70),  # 0.07 * 1000 is 70.00000000000001 in floating point
        (0.29, 290),
        (0.0001, 1),
        (1, 1),
        (500, 500),
        (1e3, 1000),
        (5000, 5000),
        ("500 steps", 500),
        ("1 step", 1),
        ("2K steps", 2000),
        ("4096 tokens", 1),
        ("4097 tokens", 2),
        ("8.2M tokens", 2002),
        ("500m TOKENS", 122071),
        ("8.2T tokens", 2001953125),
        ("1e6 tokens", 245),
        ("0 tokens", 0),
    ],
)
def test_steps_of_a_run_of_1000_with_4096_tokens_each(value: float | int | str, steps: int) -> None:
    assert Duration.parse(value).steps(1000, 4096) == steps


NUMBERS = [-1, -0.5, 1.5, float("nan"), float("inf"), True]
TEXTS = ["", "82%", "fast", "0.5 steps", "5", "5 epochs", "1.0000001M tokens"]


@pytest.mark.parametrize("value", [*NUMBERS, *TEXTS])
def test_what_is_no_duration_is_refused_with_examples(value: float | int | str) -> None:
    with pytest.raises(ConfigError) as error:
        Duration.parse(value)
    assert str(value) in str(error.value)
    assert "0.82" in str(error.value)


def test_the_published_switch_of_the_12b() -> None:
    """8.2T of 10T tokens at 736 sequences of 8192."""
    per_step = 736 * 8192
    assert Duration.parse("8.2T tokens").steps(1_658_573, per_step) == 1_360_023
    assert 1_360_022 < 8.2e12 / per_step < 1_360_023
