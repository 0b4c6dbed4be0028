"""Which operands have kernels, without a GPU: the table behind what a start says."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from nvfp4_train.precision import QuantSpec
from nvfp4_train.precision.kernels import launch
from nvfp4_train.precision.operands import without_kernel

from .linears import precision
from .recipe_files import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_kernels(name: str) -> None:
    assert not without_kernel([precision(name)], 128)


def test_a_start_names_operands_without_a_kernel() -> None:
    assert without_kernel([precision("nvfp4_four_over_six", "weight_tile=[1,16]")], 128) == [
        "no kernel quantizes dgrad weight to this nvfp4: PyTorch's own operations do, same bits, slower"
    ]


def test_an_ampere_card_makes_fp8_blocks_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know E4M3: the kernel would not compile, and PyTorch's operations say so instead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    launch._converts_to_e4m3.cache_clear()
    try:
        assert not without_kernel([precision("nvfp4")], 128)
        [line] = without_kernel([precision("fp8_block")], 128)
    finally:
        launch._converts_to_e4m3.cache_clear()
    assert line.startswith("no kernel quantizes fprop input, fprop weight, ")
    assert "to this fp8_block: PyTorch's own operations do, same bits, slower" in line


def test_tokens_that_are_no_whole_blocks_are_said_at_start() -> None:
    slower = "PyTorch's own operations do, same bits, slower"
    assert without_kernel([precision("mxfp8")], 4 * 1000 + 8) == [
        "no kernel quantizes fprop input, dgrad gradient, wgrad gradient, wgrad input to mxfp8, "
        f"4008 tokens a micro-batch being no multiple of 32: {slower}"
    ]
    assert without_kernel([precision("quartet2")], 4064) == [
        "no kernel quantizes wgrad gradient, wgrad input to nvfp4, "
        f"4064 tokens a micro-batch being no multiple of 128: {slower}"
    ]
    assert not without_kernel([precision("fp8_block")], 4008)  # partial blocks are the kernels' own
    assert not without_kernel([precision("fp8_current")], 4007)


@pytest.mark.parametrize(
    ("spec", "axis"),
    [
        (QuantSpec("nvfp4", scaling="row"), 0),
        (QuantSpec("nvfp4", scaling="row", rounding="stochastic"), 1),
        (QuantSpec("nvfp4", four_over_six="mse"), 0),
        (QuantSpec("nvfp4", (16, 16), rounding="stochastic"), 1),
        (QuantSpec("bf16"), 1),
    ],
)
def test_what_has_no_kernel(spec: QuantSpec, axis: int) -> None:
    assert not launch.known(spec, axis)


def test_more_rows_than_a_grid_counts() -> None:
    rows = 16 * 65535
    assert launch.serves(torch.empty(rows, 16, device="meta"), QuantSpec("nvfp4"), 1)
    assert not launch.serves(torch.empty(rows + 16, 16, device="meta"), QuantSpec("nvfp4"), 1)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nemotron3_super"])
def test_every_rotation_has_kernels(name: str, size: int) -> None:
    assert not without_kernel([precision(name, f"rotation={size}")], 128)


def test_one_read_makes_two_operands_of_one_format_alone() -> None:
    rows, columns = QuantSpec("nvfp4", four_over_six="mae"), QuantSpec("nvfp4", rotation=16)
    assert launch.made_together(rows, columns)
    assert launch.made_together(QuantSpec("mxfp8"), QuantSpec("mxfp8"))
    assert not launch.made_together(QuantSpec("mxfp8"), columns)
    assert not launch.made_together(QuantSpec("fp8_current"), QuantSpec("fp8_current"))
    assert not launch.made_together(QuantSpec("nvfp4", (16, 16)), columns)
    assert not launch.made_together(rows, QuantSpec("nvfp4", rotation=64))
    assert not launch.made_together(QuantSpec("nvfp4", scaling="row"), columns)
