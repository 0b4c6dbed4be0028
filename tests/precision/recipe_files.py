"""Recipes read straight from their YAML files with overrides, and small models to assign them to. Composing a whole run
takes Hydra half a second; this takes milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from nvfp4_train.precision.config import Operand, PrecisionConfig
from nvfp4_train.precision.recipes import CONFIG_DIR
from nvfp4_train.schema import from_mapping

NAMES = (
    *("bf16", "fp8_block", "fp8_current", "fp8_delayed", "mxfp8", "mxfp4"),
    *("nvfp4", "nvfp4_four_over_six", "nemotron3_super", "quartet2"),
    *("nvfp4_fwd_bf16_bwd", "bf16_fwd_nvfp4_bwd", "mxfp8_fwd_nvfp4_bwd", "nvfp4_fwd_mxfp8_bwd"),
)


@cache
def _file(name: str) -> DictConfig:
    precision = OmegaConf.load(CONFIG_DIR / "precision" / f"{name}.yaml")
    return OmegaConf.create({"four_bit_blocks": {"first": 0, "last": 0.15}, "precision": precision})


def recipe(name: str, *overrides: str) -> PrecisionConfig:
    """The recipe `name` with overrides such as `rotation=null`, values in YAML."""
    root = _file(name).copy()
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(root, f"precision.{key}", yaml.safe_load(value))
    found = OmegaConf.to_container(root, resolve=True)
    assert isinstance(found, dict)
    return from_mapping(PrecisionConfig, found["precision"], "precision")


def operands(config: Any) -> dict[str, Operand]:
    """`fprop.input` and so on -> operand."""
    return {
        "fprop.input": config.fprop.input,
        "fprop.weight": config.fprop.weight,
        "dgrad.gradient": config.dgrad.gradient,
        "dgrad.weight": config.dgrad.weight,
        "wgrad.gradient": config.wgrad.gradient,
        "wgrad.input": config.wgrad.input,
    }


@dataclass(frozen=True)
class Shape:
    """A linear of the unsharded model."""

    name: str
    block: int | None
    letter: str | None
    role: str
    in_features: int
    out_features: int


def shapes(pattern: str, hidden: int = 256, ffn: int = 512, inner: int = 512, in_proj: int = 1280) -> list[Shape]:
    """The linears of a hybrid stack, with the output layer."""
    found = []
    for block, letter in enumerate(pattern):
        linears = {
            "M": (("mixer.in_proj", "in_proj", hidden, in_proj), ("mixer.out_proj", "out_proj", inner, hidden)),
            "*": (
                ("self_attention.linear_qkv", "qkv", hidden, 2 * hidden),
                ("self_attention.linear_proj", "proj", hidden, hidden),
            ),
            "-": (("mlp.linear_fc1", "fc1", hidden, ffn), ("mlp.linear_fc2", "fc2", ffn, hidden)),
        }[letter]
        found += [Shape(f"decoder.layers.{block}.{path}", block, letter, *rest) for path, *rest in linears]
    return [*found, Shape("output_layer", None, None, "output", hidden, 384)]
