"""Rounding to the grids, and the random bits of stochastic rounding."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from nvfp4_train.precision.rounding import (
    counter_words,
    element_key,
    philox,
    random_bytes,
    round_nearest_,
    round_stochastic_,
)
from tests.precision import oracles

ELEMENTS = ("e2m1", "e4m3", "e5m2")


def round_nearest(y: torch.Tensor, element: str) -> torch.Tensor:
    return round_nearest_(y.clone(), torch.empty_like(y), element)


def round_stochastic(y: torch.Tensor, element: str, random: torch.Tensor) -> torch.Tensor:
    return round_stochastic_(y.clone(), y.new_empty(3, *y.shape), element, random)


# ---- nearest


@pytest.mark.parametrize("element", ELEMENTS)
def test_nearest_equals_ml_dtypes_at_every_decision_point_and_one_ulp_beside(element: str) -> None:
    magnitudes = [float(m) for m in oracles.grid(element)]
    middles = [(a + b) / 2 for a, b in pairwise(magnitudes)]
    points = np.array([*magnitudes, *middles, 2 * magnitudes[-1], 1e30, np.inf], np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    points = np.concatenate([points, -points])
    expected = oracles.nearest(points, element)
    assert torch.equal(round_nearest(torch.from_numpy(points), element), torch.from_numpy(expected))


@pytest.mark.parametrize("element", ELEMENTS)
def test_nearest_equals_ml_dtypes_over_all_magnitudes(element: str) -> None:
    generator = np.random.default_rng(0)
    y = (generator.standard_normal(20000) * 2.0 ** generator.uniform(-30, 17, 20000)).astype(np.float32)
    assert torch.equal(round_nearest(torch.from_numpy(y), element), torch.from_numpy(oracles.nearest(y, element)))


def test_e2m1_decision_points() -> None:
    y = torch.tensor([0.25, 0.26, 0.74, 0.75, 1.25, 1.26, 1.74, 1.75, 2.5, 2.6, 3.4, 3.5, 5.0, 5.1, 7.0])
    expected = torch.tensor([0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 6.0, 6.0])
    assert torch.equal(round_nearest(y, "e2m1"), expected)
    assert torch.equal(round_nearest(-y, "e2m1"), -expected)


def test_nan_stays_nan() -> None:
    y = torch.tensor([math.nan, 1.0])
    assert round_nearest(y, "e2m1").isnan().tolist() == [True, False]
    assert round_stochastic(y, "e2m1", torch.zeros(2, dtype=torch.uint8)).isnan().tolist() == [True, False]


# ---- stochastic


@pytest.mark.parametrize("element", ["e2m1", "e4m3"])
def test_stochastic_equals_the_rule_in_exact_arithmetic(element: str) -> None:
    generator = np.random.default_rng(1)
    magnitudes = oracles.grid(element)
    y = (generator.standard_normal(500) * (2.5 if element == "e2m1" else 100)).astype(np.float32)
    y[:100] *= 2.0**-8
    steps = np.arange(512, dtype=np.float32) / 512  # p is a multiple of 1/512: the rule's own ties
    y = np.concatenate([y, 4 + 2 * steps, -(0.5 + 0.5 * steps), [0.0, -0.0, 6.0, -6.0, 448.0, 1e9]]).astype(np.float32)
    r = generator.integers(0, 256, len(y), dtype=np.uint8)
    expected = [oracles.stochastic(float(v), int(b), magnitudes) for v, b in zip(y, r, strict=True)]
    found = round_stochastic(torch.from_numpy(y), element, torch.from_numpy(r))
    assert torch.equal(found, torch.tensor(expected))


@pytest.mark.parametrize("value", [0.25, -1.125, 1.75, 2.5, -3.75, 4.5, 5.75, 0.001953125 * 3])
def test_stochastic_goes_up_for_the_right_count_of_bytes(value: float) -> None:
    random = torch.arange(256, dtype=torch.uint8)
    found = round_stochastic(torch.full((256,), value), "e2m1", random)
    magnitudes = [float(m) for m in oracles.grid("e2m1")]
    low = max(m for m in magnitudes if m <= abs(value))
    high = min(m for m in magnitudes if m > abs(value))
    share = Fraction((abs(value) - low) / (high - low))
    # Bytes r with r + 1/2 >= 256 (1 - p); exact where 256 p is whole, so that the mean of all bytes is the value.
    ups = int((found.abs() == high).sum())
    assert ups == math.floor(256 * share + Fraction(1, 2))
    assert int((found.abs() == low).sum()) == 256 - ups
    assert (found.sign() == math.copysign(1, value)).logical_or(found == 0).all()


def test_unbiased_over_many_draws() -> None:
    draws = 100_000
    random = random_bytes(element_key(1, 2, 3, "decoder.layers.0.mixer.in_proj", "dgrad.gradient"), 1, draws).view(-1)
    for value in (0.125, 0.8125, 1.375, -2.75, 3.0625, -5.25):
        found = round_stochastic(torch.full((draws,), value), "e2m1", random)
        step = found.abs().max() - found.abs().min()
        deviation = float(step) / 2 / math.sqrt(draws)  # at most
        assert abs(float(found.double().mean()) - value) < 4 * deviation
    spread = torch.linspace(-5.99, 5.99, draws)
    error = (round_stochastic(spread, "e2m1", random) - spread).double()
    assert abs(float(error.mean())) < 4 * float(error.std()) / math.sqrt(draws)


# ---- random bits


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    whole = key[0] | key[1] << 32
    assert philox(whole, counter) == expected
    tensors = [torch.tensor([word, word]) for word in counter]
    found = philox(whole, (tensors[0], tensors[1], tensors[2], tensors[3]))
    assert [torch.as_tensor(word).tolist() for word in found] == [[word, word] for word in expected]
    assert oracles.philox(key, list(counter)) == list(expected)


@pytest.mark.parametrize(("rows", "columns"), [(5, 32), (3, 16), (7, 40), (2, 5), (33, 48)])
def test_random_bytes_equal_a_plain_loop_in_both_layouts(rows: int, columns: int) -> None:
    key = 0xFEDC_BA98_7654_3210
    expected = torch.from_numpy(oracles.random_bytes(key, rows, columns).copy())
    assert torch.equal(random_bytes(key, rows, columns), expected)
    transposed = random_bytes(key, rows, columns, axis=0)
    assert transposed.is_contiguous()
    assert torch.equal(transposed, expected.t())


def test_counters_beyond_32_bits_use_the_second_word() -> None:
    index = torch.tensor([2**32 + 5, 5, 2**32 - 1])
    found = philox(77, counter_words(index, 2**33))
    below = philox(77, counter_words(index[1:], 2**32))
    for word, small, *expected in zip(
        found,
        below,
        oracles.philox((77, 0), [5, 1, 0, 0]),
        oracles.philox((77, 0), [5, 0, 0, 0]),
        oracles.philox((77, 0), [2**32 - 1, 0, 0, 0]),
        strict=True,
    ):
        assert torch.as_tensor(word).tolist() == expected
        assert torch.as_tensor(small).tolist() == expected[1:]


def test_batches_do_not_change_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_bytes(9, 64, 64), random_bytes(9, 64, 64, axis=0)
    monkeypatch.setattr("nvfp4_train.precision.rounding._BATCH", 8)
    assert torch.equal(whole[0], random_bytes(9, 64, 64))
    assert torch.equal(whole[1], random_bytes(9, 64, 64, axis=0))


def test_bytes_are_uniform() -> None:
    counts = torch.bincount(random_bytes(3, 256, 1024).view(-1).int(), minlength=256).double()
    expected = 256 * 1024 / 256
    assert float(((counts - expected) ** 2 / expected).sum()) < 255 + 5 * math.sqrt(2 * 255)


def test_key_depends_on_every_part_and_on_nothing_else() -> None:
    base = (1234, 7, 3, "decoder.layers.5.mlp.linear_fc1", "dgrad.gradient")
    others = [
        (1235, 7, 3, base[3], base[4]),
        (1234, 8, 3, base[3], base[4]),
        (1234, 7, 4, base[3], base[4]),
        (1234, 7, 3, "decoder.layers.6.mlp.linear_fc1", base[4]),
        (1234, 7, 3, base[3], "wgrad.gradient"),
        (1234, 73, 3, base[3], base[4]),
        (12347, 3, 3, base[3], base[4]),
    ]
    keys = {element_key(*arguments) for arguments in (base, *others)}
    assert len(keys) == 1 + len(others)
    assert all(0 <= key < 2**64 for key in keys)
    assert element_key(*base) == element_key(*base)
    # A saved run must find its bits again with a later version of the program.
    assert element_key(0, 0, 0, "output_layer", "dgrad.gradient") == 16412462246086148332
