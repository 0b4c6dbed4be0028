"""The recipes by name, and the published operands of each plain format. No torch here.

A recipe is a YAML file in `configs/precision/` (or in a folder of the user's own) that names the operands of the three
GEMMs. Rules send single linears to a plain format; what that means is `standard_gemms`, equal to the recipe so named.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml

from nvfp4_train.precision.config import Dgrad, Fprop, Operand, PrecisionError, Wgrad

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"


class Gemms(NamedTuple):
    """The operands of a linear layer's three GEMMs."""

    fprop: Fprop
    dgrad: Dgrad
    wgrad: Wgrad


def standard_gemms(format: str) -> Gemms:
    """The operands of the published recipe for a plain format, without overrides: what a rule's `format` stands for.

    Sources: arXiv 2509.25149 (nvfp4, mxfp4), 2506.08027 (mxfp8), 2412.19437 (fp8_block), Transformer Engine
    (fp8_current, fp8_delayed).
    """
    if format in ("nvfp4", "mxfp4"):
        size = 16 if format == "nvfp4" else 32
        row = Operand(format, tile=(1, size))
        square = Operand(format, tile=(size, size))
        return Gemms(
            Fprop(row, square),
            Dgrad(Operand(format, tile=(1, size), rounding="stochastic"), square),
            Wgrad(
                Operand(format, tile=(1, size), rounding="stochastic", rotation=size),
                Operand(format, tile=(1, size), rotation=size),
            ),
        )
    if format == "fp8_block":
        row, square = Operand(format, tile=(1, 128)), Operand(format, tile=(128, 128))
        return Gemms(Fprop(row, square), Dgrad(row, square), Wgrad(row, row))
    if format in ("fp8_current", "fp8_delayed"):
        forward, gradient = Operand(format, element="e4m3"), Operand(format, element="e5m2")
        return Gemms(Fprop(forward, forward), Dgrad(gradient, forward), Wgrad(gradient, forward))
    assert format in ("mxfp8", "bf16"), f"no published recipe for the format {format!r}"
    operand = Operand(format, tile=(1, 32)) if format == "mxfp8" else Operand(format)
    return Gemms(Fprop(operand, operand), Dgrad(operand, operand), Wgrad(operand, operand))


class RecipeListing(NamedTuple):
    """One line of the list of recipes."""

    name: str
    description: str
    source: str
    path: Path


def list_recipes(config_dir: Path = CONFIG_DIR) -> tuple[RecipeListing, ...]:
    """The recipes of a configuration folder (its `precision/*.yaml`), by name.

    Raises:
        PrecisionError: a file that is no YAML mapping or says no name, description or source.
    """
    return tuple(_listing(path) for path in sorted(config_dir.glob("precision/*.yaml")))


def _listing(path: Path) -> RecipeListing:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise PrecisionError(f"{path} is no YAML: {error}") from error
    fields = ("description", "source")
    missing = [key for key in fields if not isinstance(found, dict) or not isinstance(found.get(key), str)]
    if missing:
        raise PrecisionError(
            f"{path} lacks {' and '.join(missing)}: a recipe says in one line what it is and where it was published."
        )
    return RecipeListing(path.stem, found["description"], found["source"], path)
