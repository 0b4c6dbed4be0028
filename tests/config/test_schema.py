"""Strict conversion of mappings: what is accepted becomes exactly that, the rest is refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.schema import differences, from_mapping, key_types, leaf_types, near_misses, to_mapping, to_yaml


@dataclass(frozen=True)
class Inner:
    size: int
    name: str = "a"


@dataclass(frozen=True)
class Outer:
    lr: float
    steps: int
    flag: bool
    text: str
    duration: float | int | str
    inner: Inner
    maybe: int | None = None
    tile: tuple[int, int] | None = None
    many: tuple[Inner, ...] = ()
    sizes: tuple[int | None, ...] = ()


GOOD = {"lr": 1e-3, "steps": 5, "flag": True, "text": "x", "duration": 0.1, "inner": {"size": 2}}


def made(**changes: object) -> Outer:
    return from_mapping(Outer, {**GOOD, **changes})


def test_values_and_defaults() -> None:
    assert made() == Outer(1e-3, 5, True, "x", 0.1, Inner(2, "a"))
    assert made(tile=[16, 16], many=[{"size": 1}, {"size": 2, "name": "b"}], sizes=[16, None]) == Outer(
        1e-3, 5, True, "x", 0.1, Inner(2), tile=(16, 16), many=(Inner(1), Inner(2, "b")), sizes=(16, None)
    )


@pytest.mark.parametrize(
    ("key", "given", "value", "kind"),
    [
        ("steps", 1e3, 1000, int),
        ("lr", 1, 1.0, float),
        ("duration", 500, 500, int),
        ("duration", 500.0, 500, int),
        ("duration", 0.5, 0.5, float),
        ("duration", "2B tokens", "2B tokens", str),
        ("maybe", None, None, type(None)),
        ("maybe", 3.0, 3, int),
    ],
)
def test_lossless_conversions(key: str, given: object, value: object, kind: type) -> None:
    found = getattr(made(**{key: given}), key)
    assert found == value
    assert type(found) is kind


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("steps", "abc", ["steps", "a whole number", "'abc'"]),
        ("steps", 1.5, ["steps", "1.5"]),
        ("steps", True, ["steps", "true"]),
        ("steps", None, ["steps", "null"]),
        ("lr", "none", ["lr", "a number", "'none'"]),
        ("lr", "1e-3", ["lr", "'1e-3'"]),
        ("lr", math.nan, ["lr", "nan"]),
        ("lr", math.inf, ["lr", "inf"]),
        ("lr", False, ["lr", "false"]),
        ("flag", 1, ["flag", "true or false", "1"]),
        ("flag", "yes", ["flag", "'yes'"]),
        ("text", False, ["text", "quote"]),
        ("text", 12, ["text", "12", "Quote"]),
        ("text", None, ["text", "null"]),
        ("duration", True, ["duration", "true"]),
        ("duration", [1], ["duration", "[1]"]),
        ("maybe", "none", ["maybe", "null"]),
        ("inner", 3, ["inner", "3"]),
        ("inner", None, ["inner"]),
        ("tile", [16], ["tile", "2", "[16]"]),
        ("tile", [16, "a"], ["tile[1]", "'a'"]),
        ("tile", 16, ["tile", "16"]),
        ("many", {"size": 1}, ["many", "list"]),
        ("many", [{"size": "x"}], ["many[0].size", "'x'"]),
        ("many", [{"sise": 1}], ["many[0].sise", "Did you mean many[0].size"]),
    ],
)
def test_refusals_name_key_value_and_wanted_type(key: str, value: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        made(**{key: value})
    for word in words:
        assert word in str(error.value)


def test_unknown_key_names_the_near_one() -> None:
    with pytest.raises(ConfigError, match=r"^inner\.sise: there is no such key\. Did you mean inner\.size\?"):
        made(inner={"size": 1, "sise": 2})
    with pytest.raises(ConfigError, match=r"zzz: there is no such key\. Known here: size, name"):
        made(inner={"size": 1, "zzz": 2})


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^inner\.size: missing; wanted a whole number"):
        made(inner={})


def test_near_misses() -> None:
    known = list(key_types(RunConfig))
    assert near_misses("data.pth", known) == ["data.path"]
    assert near_misses("stepss", known) == ["steps"]
    assert near_misses("lr", known) == ["optimizer.lr"]
    assert near_misses("optimiser.lr", known)[0] == "optimizer.lr"
    assert near_misses("zzzzzz", known) == []


def test_leaves_are_values() -> None:
    leaves = leaf_types(RunConfig)
    assert {"steps", "data.path", "precision.fprop.input.tile", "precision.rules"} <= set(leaves)
    assert not {"model", "precision.fprop", "precision.fprop.input"} & set(leaves)


def test_yaml_reads_back_to_an_equal_value() -> None:
    import yaml

    config = made(tile=[1, 16], text="no", lr=1e-8, many=[{"size": 3, "name": "1e3"}])
    assert from_mapping(Outer, yaml.safe_load(to_yaml(config))) == config
    assert "tile: [1, 16]" in to_yaml(config)


def test_differences_by_key() -> None:
    old, new = made(tile=[1, 16]), made(tile=[16, 16], inner={"size": 3})
    assert differences(old, new) == {"inner.size": (2, 3), "tile": ([1, 16], [16, 16])}
    assert differences(old, old) == {}
    assert to_mapping(old)["tile"] == [1, 16]
