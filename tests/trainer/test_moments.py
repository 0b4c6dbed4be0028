"""A flat range of a tensor as rectangles."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from nvfp4_train.checkpoints.moments import rectangles


@given(st.data())
def test_rectangles_hold_a_flat_range_in_order_and_nothing_else(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    whole = torch.arange(prod(shape)).view(shape)
    pieces = list(rectangles(shape, start, stop))
    found = [
        element
        for offset, size in pieces
        for element in whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].flatten().tolist()
    ]
    assert found == list(range(start, stop))
    assert len(pieces) <= 2 * len(shape) - 1
