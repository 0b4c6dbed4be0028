"""What a QuantSpec fills in, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from nvfp4_train.precision.config import Operand, PrecisionError, QuantSpec


@pytest.mark.parametrize(
    ("format_name", "tile"),
    [
        ("bf16", None),
        ("nvfp4", (1, 16)),
        ("mxfp4", (1, 32)),
        ("mxfp8", (1, 32)),
        ("fp8_block", (1, 128)),
        ("fp8_current", None),
        ("fp8_delayed", None),
    ],
)
def test_the_tile_is_the_formats_own_row(format_name: str, tile: tuple[int, int] | None) -> None:
    assert QuantSpec(format_name).tile == tile


def test_a_list_is_a_tile_and_equal_specs_are_equal() -> None:
    assert QuantSpec("nvfp4", tile=[16, 16]) == QuantSpec("nvfp4", tile=(16, 16))  # type: ignore[arg-type]
    assert hash(QuantSpec("nvfp4")) == hash(QuantSpec("nvfp4", tile=(1, 16)))


LEGAL: list[dict[str, Any]] = [
    {"format": "nvfp4", "tile": (16, 16), "four_over_six": "mse"},
    {"format": "nvfp4", "rotation": 128, "signs": "fresh", "correction": "eden"},
    {"format": "nvfp4", "scaling": "row", "four_over_six": "mae"},
    {"format": "nvfp4", "rounding": "stochastic", "rotation": 16},
    {"format": "mxfp4", "rotation": 32, "rounding": "stochastic"},
    {"format": "mxfp8", "tile": (32, 32), "scale_rounding": "ocp"},
    {"format": "fp8_block", "tile": (128, 128), "power_of_two": True},
    {"format": "fp8_current", "element": "e5m2"},
    {"format": "fp8_delayed", "element": "e4m3"},
]


@pytest.mark.parametrize("fields", LEGAL)
def test_legal_specs(fields: dict[str, Any]) -> None:
    QuantSpec(**fields)


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"format": "nvpf4"}, ["'nvpf4'", "Did you mean 'nvfp4'"]),
    ({"format": "nvfp4", "rounding": "stochastics"}, ["'stochastics'", "Did you mean 'stochastic'"]),
    ({"format": "nvfp4", "scaling": "block"}, ["scaling 'block'", "tensor, row"]),
    ({"format": "nvfp4", "four_over_six": "mea"}, ["'mea'", "mse, mae"]),
    ({"format": "nvfp4", "correction": "edn"}, ["Did you mean 'eden'"]),
    ({"format": "mxfp8", "element": "e5m2"}, ["'e5m2'", "mxfp8", "gradients", "Use e4m3"]),
    ({"format": "fp8_block", "element": "e5m2"}, ["'e5m2'", "fp8_block", "Use e4m3"]),
    ({"format": "nvfp4", "element": "e4m3"}, ["'e4m3'", "nvfp4", "Use e2m1"]),
    ({"format": "fp8_current", "element": "e3m4"}, ["'e3m4'", "e4m3"]),
    ({"format": "nvfp4", "tile": (1, 32)}, ["[1, 32]", "16 elements", "[1, 16]", "[16, 16]"]),
    ({"format": "fp8_block", "tile": (1, 16)}, ["[1, 16]", "[1, 128]", "[128, 128]"]),
    ({"format": "fp8_current", "tile": (1, 16)}, ["[1, 16]", "whole tensor", "Leave tile out"]),
    ({"format": "nvfp4", "rotation": 24}, ["24", "16, 32, 64, 128"]),
    ({"format": "nvfp4", "rotation": 16, "tile": (16, 16)}, ["rotation 16", "[16, 16]", "[1, 16]"]),
    ({"format": "fp8_block", "rotation": 16}, ["rotation 16", "fp8_block", "nvfp4 or mxfp4"]),
    ({"format": "nvfp4", "signs": "fresh"}, ["'fresh'", "rotation is None"]),
    ({"format": "mxfp8", "rounding": "stochastic"}, ["'stochastic'", "mxfp8", "'nearest'"]),
    ({"format": "mxfp4", "scaling": "row"}, ["'row'", "mxfp4", "'tensor'"]),
    ({"format": "nvfp4", "scaling": "row", "tile": (16, 16)}, ["'row'", "[1, 16]"]),
    ({"format": "nvfp4", "four_over_six": "mse", "rounding": "stochastic"}, ["'mse'", "'stochastic'"]),
    ({"format": "nvfp4", "four_over_six": "mse", "rotation": 16}, ["'mse'", "rotation 16"]),
    ({"format": "mxfp4", "four_over_six": "mae"}, ["'mae'", "mxfp4"]),
    ({"format": "nvfp4", "scale_rounding": "ocp"}, ["'ocp'", "mxfp4, mxfp8"]),
    ({"format": "mxfp8", "power_of_two": True}, ["power_of_two", "fp8_block"]),
    ({"format": "nvfp4", "correction": "eden"}, ["'eden'", "rotation 128"]),
    ({"format": "nvfp4", "correction": "eden", "rotation": 128, "rounding": "stochastic"}, ["'eden'", "nearest"]),
    ({"format": "mxfp4", "correction": "eden", "rotation": 128}, ["'eden'", "mxfp4"]),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_refused_with_the_value_and_the_way_out(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PrecisionError) as error:
        QuantSpec(**fields)
    for word in words:
        assert word in str(error.value)


def test_an_operand_checks_its_spec_and_its_source() -> None:
    assert Operand("nvfp4", source="decoded").tile == (1, 16)
    with pytest.raises(PrecisionError, match="Did you mean 'decoded'"):
        Operand("nvfp4", source="decode")
    with pytest.raises(PrecisionError, match="e5m2"):
        Operand("mxfp8", element="e5m2")


def test_the_schema_needs_no_torch() -> None:
    code = (
        "import sys; from nvfp4_train.precision import QuantSpec; QuantSpec('nvfp4'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
