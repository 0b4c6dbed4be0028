"""Which operands have kernels, without a GPU: the table behind what a start says."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from nvfp4_train.precision import QuantSpec
from nvfp4_train.precision.kernels import launch
from nvfp4_train.precision.operands import without_kernel

from .linears import precision
from .recipe_files import NAMES

SLOW = {
    "quartet2": ["dgrad gradient, dgrad weight, wgrad gradient, wgrad input to this nvfp4"],
    "nvfp4_fwd_bf16_bwd": ["fprop input to this nvfp4"],  # row scaling
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_start_says_of_each_recipe(name: str) -> None:
    lines = without_kernel([precision(name)], 128)
    expected = SLOW.get(name, [])
    assert len(lines) == len(expected)
    for line, operands in zip(lines, expected, strict=True):
        assert line == f"no kernel quantizes {operands}: PyTorch's own operations do, same bits, slower"


def test_tokens_that_are_no_whole_blocks_are_said_at_start() -> None:
    slower = "PyTorch's own operations do, same bits, slower"
    assert without_kernel([precision("mxfp8")], 4 * 1000 + 8) == [
        "no kernel quantizes fprop input, dgrad gradient, wgrad gradient, wgrad input to mxfp8, "
        f"4008 tokens a micro-batch being no multiple of 32: {slower}"
    ]
    assert not without_kernel([precision("fp8_block")], 4008)  # partial blocks are the kernels' own
    assert not without_kernel([precision("fp8_current")], 4007)


@pytest.mark.parametrize(
    ("spec", "axis"),
    [
        (QuantSpec("nvfp4", scaling="row"), 1),
        (QuantSpec("nvfp4", rotation=16), 1),
        (QuantSpec("nvfp4", rotation=32), 0),
        (QuantSpec("nvfp4", rotation=16, signs="fresh"), 0),
        (QuantSpec("mxfp4", rotation=16), 0),
        (QuantSpec("nvfp4", four_over_six="mse"), 0),
        (QuantSpec("nvfp4", (16, 16), rounding="stochastic"), 1),
        (QuantSpec("bf16"), 1),
    ],
)
def test_what_has_no_kernel(spec: QuantSpec, axis: int) -> None:
    assert not launch.known(spec, axis)


def test_one_read_makes_two_operands_of_one_format_alone() -> None:
    rows, columns = QuantSpec("nvfp4", four_over_six="mae"), QuantSpec("nvfp4", rotation=16)
    assert launch.made_together(rows, columns)
    assert launch.made_together(QuantSpec("mxfp8"), QuantSpec("mxfp8"))
    assert not launch.made_together(QuantSpec("mxfp8"), columns)
    assert not launch.made_together(QuantSpec("fp8_current"), QuantSpec("fp8_current"))
    assert not launch.made_together(QuantSpec("nvfp4", (16, 16)), columns)
