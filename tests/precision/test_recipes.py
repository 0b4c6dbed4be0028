"""The recipes as files: which there are, that they have one shape, and that their operands are the published ones."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nvfp4_train.compose import compose_precision
from nvfp4_train.precision.assignment import assign
from nvfp4_train.precision.backends import NATIVE_SINCE
from nvfp4_train.precision.config import Operand, PrecisionError
from nvfp4_train.precision.recipes import CONFIG_DIR, Gemms, list_recipes, standard_gemms
from nvfp4_train.precision.validation import KNOBS
from tests.precision.recipe_files import NAMES, operands, recipe, shapes


def nv(rounding: str = "nearest", **more: object) -> Operand:
    return Operand("nvfp4", tile=more.pop("tile", (1, 16)), rounding=rounding, **more)  # type: ignore[arg-type]


def eden(source: str) -> Operand:
    return nv(rotation=128, signs="fresh", correction="eden", source=source)


BF16, DECODED = Operand("bf16"), Operand("bf16", source="decoded")
MXFP8 = Operand("mxfp8", tile=(1, 32))
E4M3 = {name: Operand(name, element="e4m3") for name in ("fp8_current", "fp8_delayed")}
E5M2 = {name: Operand(name, element="e5m2") for name in ("fp8_current", "fp8_delayed")}
BLOCK, BLOCK_WEIGHT = Operand("fp8_block", tile=(1, 128)), Operand("fp8_block", tile=(128, 128))
SQUARE = (16, 16)
NVFP4_BACKWARD = [nv("stochastic"), nv(tile=SQUARE), nv("stochastic", rotation=16), nv(rotation=16)]
MIXED_BACKWARD = [nv("stochastic"), nv(), nv("stochastic", rotation=16), nv(rotation=16)]
MX4 = Operand("mxfp4", tile=(1, 32))
MX4_WEIGHT = Operand("mxfp4", tile=(32, 32))

# In the order fprop input and weight, dgrad gradient and weight, wgrad gradient and input.
PUBLISHED = {
    "bf16": [BF16] * 6,
    "fp8_block": [BLOCK, BLOCK_WEIGHT, BLOCK, BLOCK_WEIGHT, BLOCK, BLOCK],
    **{name: [E4M3[name], E4M3[name], E5M2[name], E4M3[name], E5M2[name], E4M3[name]] for name in E4M3},
    "mxfp8": [MXFP8] * 6,
    "mxfp4": [
        MX4,
        MX4_WEIGHT,
        Operand("mxfp4", tile=(1, 32), rounding="stochastic"),
        MX4_WEIGHT,
        Operand("mxfp4", tile=(1, 32), rounding="stochastic", rotation=32),
        Operand("mxfp4", tile=(1, 32), rotation=32),
    ],
    "nvfp4": [nv(), nv(tile=SQUARE), *NVFP4_BACKWARD],
    "nvfp4_four_over_six": [
        nv(four_over_six="mse"),
        nv(tile=SQUARE, four_over_six="mse"),
        nv("stochastic"),
        nv(tile=SQUARE, four_over_six="mse"),
        *NVFP4_BACKWARD[2:],
    ],
    "nemotron3_super": [nv(), nv(tile=SQUARE), *NVFP4_BACKWARD],
    "quartet2": [nv(four_over_six="mse")] * 2 + [eden("original"), eden("decoded")] * 2,
    "nvfp4_fwd_bf16_bwd": [nv(scaling="row", four_over_six="mse"), nv(four_over_six="mse"), *[BF16, DECODED] * 2],
    "bf16_fwd_nvfp4_bwd": [BF16, BF16, *MIXED_BACKWARD],
    "mxfp8_fwd_nvfp4_bwd": [MXFP8, MXFP8, *MIXED_BACKWARD],
    "nvfp4_fwd_mxfp8_bwd": [nv(), nv(), *[MXFP8] * 4],
}  # fmt: skip

FIRST_LAST = {"bf16": (0, 0), "mxfp8": (0, 0), **{f"fp8_{kind}": (1, 2) for kind in ("block", "current", "delayed")}}


@pytest.mark.parametrize("name", NAMES)
def test_operands_are_the_published_ones(name: str) -> None:
    assert list(operands(recipe(name)).values()) == PUBLISHED[name]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_kept_in_bf16_by_default(name: str) -> None:
    blocks = recipe(name).bf16_blocks
    assert blocks.counts(62) == FIRST_LAST.get(name, (0, 10))
    assert blocks.counts(8) == FIRST_LAST.get(name, (0, 2))
    assert blocks.counts(7) == ((0, 0) if name in FIRST_LAST else (0, 2))


@pytest.mark.parametrize("format", NATIVE_SINCE)
def test_a_rule_format_means_the_recipe_of_that_name(format: str) -> None:
    config = recipe(format)
    assert standard_gemms(format) == Gemms(config.fprop, config.dgrad, config.wgrad)


def test_the_list_names_every_recipe_with_a_line_and_a_source() -> None:
    listed = list_recipes()
    assert sorted(NAMES) == [listing.name for listing in listed]
    for listing in listed:
        assert recipe(listing.name).name == listing.name
        assert recipe(listing.name).description == listing.description
        assert listing.source
        assert len(listing.description) < 110


def test_every_file_has_the_same_keys_in_the_same_order() -> None:
    files = {name: yaml.safe_load((CONFIG_DIR / "precision" / f"{name}.yaml").read_text()) for name in NAMES}
    for name, found in files.items():
        assert list(found) == list(files["nvfp4"]), name
        assert tuple(found["knobs"]) == KNOBS, name


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_a_page_that_speaks_of_it(name: str) -> None:
    text = (CONFIG_DIR / "precision" / f"{name}.yaml").read_text()
    page = text.partition("# Page: ")[2].split("\n")[0]
    written = (CONFIG_DIR / "precision" / page).read_text()
    assert f"`{name}`" in written
    for heading in ("## Needs", "## Use", "## Evidence", "## Known limits"):
        assert heading in written


def commands() -> list[str]:
    pages = sorted((CONFIG_DIR / "precision").glob("*.md"))
    lines = [line.strip() for page in pages for line in page.read_text().splitlines()]
    return [line for line in lines if line.startswith("python -m nvfp4_train.train")]


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_pages_work(command: str) -> None:
    words = shlex.split(command, comments=True)[3:]
    name = next((word.removeprefix("precision=") for word in words if word.startswith("precision=")), "nvfp4")
    overrides = [word.removeprefix("precision.") for word in words if word.startswith("precision.")]
    assert len(overrides) + any(word.startswith("precision=") for word in words) == len(words)
    assert assign(recipe(name, *overrides), shapes("M-M*-M-M*-"))


@pytest.mark.parametrize("name", NAMES)
def test_published_values_are_the_first_of_the_knobs(name: str) -> None:
    config = recipe(name)
    for knob in KNOBS:
        choices = getattr(config.knobs, knob)
        assert getattr(config, knob) == (choices[0] if choices else None), knob


def test_a_recipe_of_the_users_own_changes_what_it_says_alone(tmp_path: Path) -> None:
    folder = tmp_path / "precision"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        "defaults: [nvfp4, _self_]\nname: mine\ndescription: nvfp4 with a longer rotation\nsource: ours\nrotation: 64\n"
    )
    mine = compose_precision("mine", ["precision.gradient_rounding=nearest"], [tmp_path])
    assert (mine.name, mine.rotation) == ("mine", 64)
    assert operands(mine) == operands(recipe("nvfp4", "rotation=64", "gradient_rounding=nearest"))
    assert [listing.name for listing in list_recipes(tmp_path)] == ["mine"]


def test_a_recipe_without_a_source_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "mine.yaml").write_text("name: mine\ndescription: x\n")
    with pytest.raises(PrecisionError, match=r"mine\.yaml lacks source"):
        list_recipes(tmp_path)


def test_reading_recipes_needs_no_torch() -> None:
    modules = "recipes, assignment, phases, report, backends"
    code = f"import sys; from nvfp4_train.precision import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CONFIG_DIR.parent)
