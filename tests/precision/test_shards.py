"""A part of a matrix is quantized as it is within the whole: its scale by the whole's amax, its bits by their place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_train.precision import QuantSpec, quantize_values
from nvfp4_train.precision.rounding import random_bytes
from nvfp4_train.precision.shards import WHOLE, Axis, Shard

ROWS, COLUMNS = 256, 512
STOCHASTIC = [
    QuantSpec("nvfp4", rounding="stochastic"),
    QuantSpec("nvfp4", rounding="stochastic", rotation=16),
    QuantSpec("mxfp4", rounding="stochastic", rotation=32),
    QuantSpec("nvfp4", rotation=128, signs="fresh", correction="eden"),
]
# Of the rows an early and a late piece, as context parallelism cuts them; of the columns a half, or packed parts.
PIECES = Axis(ROWS, ((0, 128), (128, 128)))
SHARDS = {
    "columns": Shard(columns=Axis(COLUMNS, ((256, 256),))),
    "rows": Shard(rows=Axis(ROWS, ((128, 128),))),
    "packed columns": Shard(columns=Axis(COLUMNS, ((128, 128), (384, 128)))),
    "both": Shard(Axis(ROWS, ((128, 128),)), Axis(COLUMNS, ((0, 256),))),
}


def cut(x: Tensor, shard: Shard) -> Tensor:
    """The part of x."""
    for dim, axis in enumerate(shard):
        if axis is not None:
            x = x.index_select(dim, axis.positions("cpu"))
    return x


@pytest.fixture(scope="module")
def matrix() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shard", SHARDS.values(), ids=list(SHARDS))
@pytest.mark.parametrize("spec", STOCHASTIC, ids=lambda spec: f"{spec.format}-{spec.rotation}")
def test_a_part_has_the_bits_of_the_whole(matrix: Tensor, spec: QuantSpec, shard: Shard, axis: int) -> None:
    whole = quantize_values(matrix, spec, key=5, axis=axis)
    part = quantize_values(cut(matrix, shard), spec, key=5, axis=axis, amax=whole.amax, shard=shard)
    assert torch.equal(part.values, cut(whole.values, shard))
    unplaced = quantize_values(cut(matrix, shard), spec, key=5, axis=axis, amax=whole.amax)
    assert not torch.equal(unplaced.values, part.values)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (Axis(40, ((8, 8), (24, 8))), Axis(96, ((48, 48),))),
        (Axis(40, ((3, 5),)), Axis(112, ((8, 40), (100, 12)))),  # parts that begin within a block
        (24, Axis(100, ((50, 50),))),  # rows that end within a block
        (Axis(30, ((10, 10),)), 100),
    ],
)
def test_bytes_by_their_place(rows: int | Axis, columns: int | Axis, axis: int) -> None:
    sizes = [extent.size if isinstance(extent, Axis) else extent for extent in (rows, columns)]
    expected = random_bytes(9, *sizes)
    for dim, extent in enumerate((rows, columns)):
        if isinstance(extent, Axis):
            expected = expected.index_select(dim, extent.positions("cpu"))
    found = random_bytes(9, rows, columns, axis=axis)
    assert torch.equal(found if axis == 1 else found.t(), expected)


@pytest.mark.parametrize(
    ("rank", "pieces"), [(0, ((0, 128), (256, 56), (368, 16))), (1, ((128, 128), (312, 56), (384, 16)))]
)
def test_packed_parts_of_a_weight_are_shared_one_by_one(rank: int, pieces: tuple[tuple[int, int], ...]) -> None:
    from nvfp4_train.precision.linear import weight_shard

    group = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    weight = SimpleNamespace(partition_sizes=[128, 56, 16])
    linear: Any = SimpleNamespace(tp_group=group, output_size_per_partition=200, weight=weight)
    rows, columns = weight_shard(linear)
    assert columns is None
    assert rows is not None
    assert (rows.size, rows.pieces) == (400, pieces)


def test_a_part_that_is_filled_up_draws_its_last_piece_out() -> None:
    padded = Axis(60, ((0, 10), (50, 10))).padded(32)
    assert padded.pieces == ((0, 10), (50, 22))
    assert padded.length == 32
    shard = Shard(rows=Axis(60, ((0, 10), (50, 10))))
    spec = QuantSpec("nvfp4", rounding="stochastic", rotation=16)
    assert quantize_values(torch.ones(20, 32), spec, key=1, axis=0, shard=shard).values.shape == (32, 32)


def test_blocks_stand_where_their_first_element_does() -> None:
    assert Axis(256, ((64, 32), (128, 48))).blocks(16).positions("cpu").tolist() == [4, 5, 8, 9, 10]
    assert Axis(256, ((64, 24), (128, 40))).blocks(16).positions("cpu").tolist() == [4, 5, 8, 9]
    assert WHOLE.extents((3, 4)) == (3, 4)
