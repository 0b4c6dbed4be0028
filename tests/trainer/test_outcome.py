"""What a step comes to: the update's factor bit for bit as Python computes it, and NaN where the step is skipped."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nvfp4_train.config import ParallelConfig
from nvfp4_train.distributed import World, process_groups
from nvfp4_train.outcome import LossSum, Outcome, of_mean, update_factor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAN, INF = math.nan, math.inf


@pytest.fixture
def world(single_process: None) -> Iterator[World]:
    with process_groups(ParallelConfig(), 1) as found:
        yield found


def number(value: float, device: str = "cpu") -> Tensor:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.tensor(value, dtype=torch.float64, device=device)


def in_python(norm: float, limit: float, tokens: int) -> tuple[float, float]:
    """Norm of the mean gradient and factor, in Python's FP64."""
    mean = torch.tensor(norm / max(1, tokens), dtype=torch.float32).item()
    clip = limit / mean if 0 < limit < mean else 1.0
    return mean, clip / max(1, tokens)


@pytest.mark.parametrize("device", DEVICES)
def test_norm_and_factor_have_the_bits_of_python(device: str) -> None:
    draw = random.Random(0)
    cases = [
        (10 ** draw.uniform(-9, 9), draw.choice([0.0, 1.0, 10 ** draw.uniform(-3, 3)]), draw.randint(0, 1 << 24))
        for _ in range(1000)
    ]
    clipped = 0
    for norm, limit, tokens in [*cases, (0.0, 1.0, 0), (3.0, 3.0, 1), (1e38, 1.0, 1), (1e-300, 1e-3, 7)]:
        mean = of_mean(number(norm, device), number(tokens, device))
        factor = update_factor(mean, limit, number(tokens, device))
        assert (mean.item(), factor.item()) == in_python(norm, limit, tokens), (norm, limit, tokens)
        clipped += 0 < limit < mean.item()
    assert 50 < clipped < 900


def test_an_update_takes_the_mean_and_clips_it() -> None:
    assert of_mean(number(3.0), number(0)) == 3.0
    assert of_mean(number(1.0), number(3)) == torch.tensor(1 / 3).item()
    assert update_factor(number(3.0), 0.0, number(4096)) == 2**-12
    assert update_factor(number(3.0), 3.0, number(4096)) == 2**-12
    assert update_factor(number(4.0), 1.0, number(4096)) == 2**-14
    assert update_factor(number(0.0), 1.0, number(0)) == 1.0


def outcome(world: World, nats: float, norm: float, limit: float = 1.0, tokens: int = 8) -> Outcome:
    sums = torch.tensor([[1.0, 0.0], [nats, tokens]], dtype=torch.float64, device=world.device)
    return Outcome(LossSum(sums, world), number(norm).to(world.device), limit, world)


def test_a_sound_step_is_not_skipped(world: World) -> None:
    found = outcome(world, nats=3.0, norm=16.0)
    assert found.factor == 1 / 16
    assert found.wait() == (0.5, 2.0, False)
    empty = outcome(world, nats=-1.0, norm=0.0, tokens=0)
    assert empty.factor == 1
    assert empty.wait() == (0.0, 0.0, False)


@pytest.mark.parametrize("limit", [0.0, 1.0])
@pytest.mark.parametrize(
    ("nats", "norm"), [(NAN, 1.0), (INF, 1.0), (-INF, 1.0), (1.0, NAN), (1.0, INF), (INF, INF), (1.0, 1e40)]
)
def test_a_bad_number_skips_the_step(nats: float, norm: float, limit: float, world: World) -> None:
    """Also a norm that is too large for FP32."""
    found = outcome(world, nats, norm, limit)
    assert found.factor.isnan()
    loss, mean, skipped = found.wait()
    assert skipped
    assert math.isfinite(loss) == math.isfinite(nats)
    assert math.isfinite(mean) == (norm == 1.0)
