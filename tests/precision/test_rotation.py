"""The randomized Hadamard transform against its matrix, and its fixed order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvfp4_train.precision import QuantSpec
from nvfp4_train.precision.rotation import rotate, signs_of
from tests.precision import oracles

SIZES = (16, 32, 64, 128)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("signs", ["fixed", "fresh"])
@pytest.mark.parametrize("axis", [0, 1])
def test_equals_the_matrix(size: int, signs: str, axis: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(384, 256)
    spec = QuantSpec("nvfp4", rotation=size, signs=signs)
    chosen = [int(s) for s in signs_of(spec, 99)]
    rows = (x if axis == 1 else x.t()).double().numpy()
    expected = (rows.reshape(-1, size) @ oracles.hadamard(size, chosen)).reshape(rows.shape)
    found = rotate(x, spec, 99, axis)
    found = found if axis == 1 else found.t()
    assert np.abs(found.double().numpy() - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("size", SIZES)
def test_order_of_the_sums_is_signs_and_scale_then_neighbours_first(size: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(3, size)
    scale = np.float32(1 / np.sqrt(size))
    values = [
        [np.float32(v) * np.float32(oracles.SIGNS[i % 16] * scale) for i, v in enumerate(row)] for row in x.numpy()
    ]
    for row in values:
        half = 1
        while half < size:
            for start in range(0, size, 2 * half):
                for i in range(start, start + half):
                    row[i], row[i + half] = row[i] + row[i + half], row[i] - row[i + half]
            half *= 2
    expected = torch.from_numpy(np.array(values, np.float32))
    spec = QuantSpec("nvfp4", rotation=size)
    assert torch.equal(rotate(x, spec), expected)
    assert torch.equal(rotate(x.t(), spec, axis=0), expected.t())
    assert torch.equal(rotate(x.bfloat16().float(), spec).bfloat16(), rotate(x.bfloat16(), spec))


@pytest.mark.parametrize("signs", ["fixed", "fresh"])
def test_cancels_in_a_product(signs: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(256, 48), torch.randn(256, 64)
    spec = QuantSpec("nvfp4", rotation=128, signs=signs)
    rotated = rotate(a, spec, 5, axis=0).t() @ rotate(b, spec, 5, axis=0)
    torch.testing.assert_close(rotated, a.t() @ b, rtol=1e-4, atol=1e-4)


def test_fixed_signs_repeat_and_fresh_signs_follow_the_key() -> None:
    fixed = signs_of(QuantSpec("nvfp4", rotation=64), 1)
    assert fixed.tolist() == oracles.SIGNS * 4
    spec = QuantSpec("nvfp4", rotation=128, signs="fresh")
    words = oracles.philox((7, 1), [0, 0, 1, 0])
    expected = [-1.0 if words[i // 32] >> i % 32 & 1 else 1.0 for i in range(128)]
    assert signs_of(spec, 7 + 2**32).tolist() == expected
    assert signs_of(spec, 8 + 2**32).tolist() != expected


def test_ragged_contraction_is_padded_with_zeros() -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 24).bfloat16()
    spec = QuantSpec("nvfp4", rotation=16)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 12))
    assert torch.equal(rotate(x, spec, axis=0), rotate(padded, spec, axis=0))
    assert rotate(x, spec, axis=1).shape == (100, 32)


def test_without_rotation_x_is_returned_and_never_changed() -> None:
    x = torch.randn(16, 16)
    before = x.clone()
    assert rotate(x, QuantSpec("nvfp4")) is x
    rotate(x, QuantSpec("nvfp4", rotation=16))
    assert torch.equal(x, before)


def test_no_overflow_where_the_result_has_none() -> None:
    x = torch.zeros(1, 16)
    x[0, :3] = torch.finfo(torch.float32).max
    assert rotate(x, QuantSpec("nvfp4", rotation=16)).isfinite().all()
