"""A run folder, read: the curves of `metrics.jsonl`, and `config.yaml` and `precision.json` where they are there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from nvfp4_train.config import ConfigError

METRICS = "metrics.jsonl"
_PASSES = ("precision/forward", "precision/backward")


class CompareError(ConfigError):
    """A user's mistake about runs to compare: says what was wrong, why, and what to do instead."""


@dataclass(frozen=True)
class Curve:
    """One loss over a run.

    Attributes:
        steps: int64, strictly increasing.
        tokens: int64, consumed up to and with the step, strictly increasing.
        losses: float64, nats; NaN where the run logged no finite number.
    """

    steps: NDArray[np.int64]
    tokens: NDArray[np.int64]
    losses: NDArray[np.float64]

    def finite(self) -> Curve:
        """The points whose loss is a finite number."""
        kept = np.isfinite(self.losses)
        return Curve(self.steps[kept], self.tokens[kept], self.losses[kept])

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Switch:
    """From `step` (at `tokens`) on, the run went on as `text` says: `forward bf16, backward recipe`, or, where it was
    resumed with another recipe, `recipe fp8_block`.
    """

    step: int
    tokens: int
    text: str


@dataclass(frozen=True)
class Run:
    """What a run folder says.

    Attributes:
        name: of its folder; where runs of one comparison share it, with as many of its parents as tell them apart.
        train, val: the curves; `val` may be empty.
        hashes: of the global batch, by step.
        switches: of precision during the run, in order.
        quant: the last value of each `quant/...` metric. quant_steps: the step of each of them.
        config: `config.yaml`, or None where there is none.
        precision: `precision.json`, or None where there is none.
        notes: what a reader of the comparison should know about this run.
    """

    name: str
    path: Path
    train: Curve
    val: Curve
    hashes: Mapping[int, str]
    switches: tuple[Switch, ...] = ()
    quant: Mapping[str, float] = field(default_factory=dict)
    quant_steps: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    precision: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def seed(self) -> int | None:
        """The seed of the run, where its configuration is known."""
        return None if self.config is None else self.config.get("seed")


def open_run(path: Path) -> Run:
    """Read the run folder `path`; of its files only `metrics.jsonl` must be there.

    A last line that is still being written is left out and noted. Raises CompareError, with file and line where there
    is one, for a folder that is no run, a broken line, or metrics without a training loss.
    """
    metrics = path / METRICS
    if not metrics.is_file():
        raise CompareError(
            f"{path}: no run folder, there is no {METRICS} in it. Give the folder that `train` printed as its run_dir."
        )
    reader = _Reader(metrics)
    reader.read()
    train, val = reader.curve(reader.train), reader.curve(reader.val)
    if not len(train):
        raise CompareError(
            f"{metrics}: no line holds train/loss, so there is nothing to compare. Has the run finished its first step?"
        )
    infinite = int(np.count_nonzero(~np.isfinite(train.losses)))
    if infinite:
        reader.notes.append(f"{infinite} of {len(train)} steps have no finite training loss and are left out")
    return Run(
        name=_text(path.resolve().name),
        path=path,
        train=train,
        val=val,
        hashes=reader.hashes,
        switches=tuple(reader.switches),
        quant=reader.quant,
        quant_steps=reader.quant_steps,
        config=_read_mapping(path / "config.yaml"),
        precision=_read_mapping(path / "precision.json"),
        notes=tuple(reader.notes),
    )


class _Reader:
    """Collects the columns of one metrics file; where a step is there twice, the later line counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.train: dict[int, tuple[int, float]] = {}
        self.val: dict[int, tuple[int, float]] = {}
        self.hashes: dict[int, str] = {}
        self.switches: list[Switch] = []
        self.quant: dict[str, float] = {}
        self.quant_steps: dict[str, int] = {}
        self.notes: list[str] = []
        self._passes = ""
        self._recipes: dict[int, tuple[int, str]] = {}
        self._first_step: int | None = None

    def read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")
        last = max((number for number, line in enumerate(lines, 1) if line.strip()), default=0)
        for number, line in enumerate(lines[:last], 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                if number < last:
                    raise CompareError(
                        f"{self.path}:{number}: not JSON ({error}). Delete this line, or cut the file before it."
                    ) from None
                self.notes.append(
                    f"line {number} of {METRICS} is not whole (the run is being written, or was cut off); left out"
                )
                continue
            self._take(record, number)
        for step, (tokens, recipe) in sorted(self._recipes.items()):
            self.switches.append(Switch(step, tokens, f"recipe {recipe}"))
            self.notes.append(f"recipe changed to {recipe} at step {step}")
        self.switches.sort(key=lambda switch: switch.step)

    def _take(self, record: Any, number: int) -> None:
        if not isinstance(record, dict):
            raise CompareError(
                f"{self.path}:{number}: not a JSON object but {type(record).__name__}; each line is one object."
            )
        step, tokens = self._whole(record, "step", number), self._whole(record, "tokens", number)
        if self._first_step is None:
            self._first_step = step
        for name, column in (("train/loss", self.train), ("val/loss", self.val)):
            if name in record:
                column[step] = tokens, self._number(record, name, number)
        if isinstance(record.get("data/hash"), str):
            self.hashes[step] = record["data/hash"]
        passes = ", ".join(f"{name.removeprefix('precision/')} {record[name]}" for name in _PASSES if name in record)
        if passes and passes != self._passes:
            if step != self._first_step:
                self.switches.append(Switch(step, tokens, passes))
            self._passes = passes
        if isinstance(record.get("precision/recipe"), str):  # in the first line after a resume that changed it
            self._recipes[step] = tokens, record["precision/recipe"]
        for name, value in record.items():
            if name.startswith("quant/") and isinstance(value, int | float):
                self.quant[name], self.quant_steps[name] = float(value), step

    def _whole(self, record: dict[str, Any], name: str, number: int) -> int:
        value = record.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CompareError(
                f"{self.path}:{number}: {name} is {value!r}; each line of metrics needs it as a whole number."
            )
        return value

    def _number(self, record: dict[str, Any], name: str, number: int) -> float:
        value = record[name]
        if value is None:  # JSON has no other word for NaN and infinity
            return np.nan
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CompareError(f"{self.path}:{number}: {name} is {value!r}; wanted a number or null.")
        return float(value) if np.isfinite(value) else np.nan

    def curve(self, column: dict[int, tuple[int, float]]) -> Curve:
        steps = np.array(sorted(column), dtype=np.int64)
        tokens = np.array([column[step][0] for step in steps], dtype=np.int64)
        losses = np.array([column[step][1] for step in steps], dtype=np.float64)
        backwards = np.flatnonzero(np.diff(tokens) <= 0)
        if len(backwards):
            step = steps[backwards[0] + 1]
            raise CompareError(
                f"{self.path}: tokens do not grow at step {step}; lines of two runs may be mixed in this file."
            )
        return Curve(steps, tokens, losses)


def _read_mapping(path: Path) -> Mapping[str, Any] | None:
    """A JSON or YAML file that holds a mapping, or None where there is no file."""
    if not path.is_file():
        return None
    try:
        content = (
            yaml.safe_load(path.read_text(encoding="utf-8"))
            if path.suffix == ".yaml"
            else json.loads(path.read_text(encoding="utf-8"))
        )
    except (ValueError, yaml.YAMLError) as error:
        raise CompareError(
            f"{path}: not readable ({error}). Mend it, or move it away: a run is compared without it, too."
        ) from None
    if not isinstance(content, dict):
        raise CompareError(f"{path}: wanted keys and values, got {type(content).__name__}. Mend it, or move it away.")
    return content


@dataclass(frozen=True)
class Group:
    """One configuration in one or several seeds: what one argument of `compare` names."""

    name: str
    runs: tuple[Run, ...]


def open_group(argument: str) -> Group:
    """The runs that one argument names: a run folder, several joined by commas, or a folder that holds run folders.

    Raises CompareError where there is no run, or the runs differ in more than their seed.
    """
    places = _places(argument)
    if len(places) == 1 and places[0].is_dir() and not (places[0] / METRICS).is_file():
        paths = sorted(child for child in places[0].iterdir() if (child / METRICS).is_file())
        if not paths:
            raise CompareError(f"{argument}: neither a run folder (no {METRICS}) nor a folder that holds run folders.")
    else:
        paths = places
    runs = tuple(open_run(path) for path in paths)
    _check_seeds(argument, runs)
    return Group(_text(",".join(place.resolve().name for place in places)), runs)


def _places(argument: str) -> list[Path]:
    """The folders that an argument names; a comma in the name of one that is there is no separator."""
    if Path(argument).exists():
        return [Path(argument)]
    return [Path(part) for part in argument.split(",") if part] or [Path(argument)]


def open_groups(arguments: Sequence[str]) -> list[Group]:
    """`open_group` of each; other folders of one name are called by the shortest ends of their paths that tell them
    apart.
    """
    groups = [open_group(argument) for argument in arguments]
    names = distinct_names([_places(argument) for argument in arguments])
    run_names = iter(distinct_names([[run.path] for group in groups for run in group.runs]))
    return [
        Group(name, tuple(replace(run, name=next(run_names)) for run in group.runs))
        for name, group in zip(names, groups, strict=True)
    ]


def _text(name: str) -> str:
    """A folder's name may be bytes that are no UTF-8; pictures and pages want text."""
    return name.encode("utf-8", "backslashreplace").decode()


def distinct_names(named: Sequence[Sequence[Path]]) -> list[str]:
    """A name for each item, one or several folders: their names, joined by commas, each with as few of its parents as
    tell the item apart from all others, and its folders from each other. Items of the same folders have the same name.
    """
    items = [tuple(path.resolve() for path in paths) for paths in named]

    def ends(item: tuple[Path, ...], parts: int) -> list[str]:
        return [_text(str(Path(*path.parts[-parts:]))) for path in item]

    def unclear(item: tuple[Path, ...], parts: int) -> bool:
        own = ends(item, parts)
        return len(set(own)) < len(set(item)) or any(own == ends(other, parts) for other in items if other != item)

    found = []
    for item in items:
        parts, deepest = 1, max(len(path.parts) for path in item)
        while parts < deepest and unclear(item, parts):
            parts += 1
        found.append(",".join(ends(item, parts)))
    return found


def _check_seeds(argument: str, runs: tuple[Run, ...]) -> None:
    """Several runs in one argument must be one configuration in different seeds."""
    if len(runs) == 1:
        return
    without = [run.name for run in runs if run.seed is None]
    if without:
        raise CompareError(
            f"{argument}: {', '.join(without)} without config.yaml or without a seed in it, so it cannot be one of "
            "several seeds. Give its folder as an argument of its own."
        )
    for run in runs[1:]:
        keys = [key for key in config_differences(runs[0], run) if key != "seed"]
        if keys:
            raise CompareError(
                f"{argument}: {runs[0].name} and {run.name} differ in {', '.join(keys)}; runs joined in one argument "
                "may differ in their seed alone. Give them as arguments of their own."
            )
    seeds = [run.seed for run in runs]
    twice = sorted({str(seed) for seed in seeds if seeds.count(seed) > 1})
    if twice:
        raise CompareError(f"{argument}: seed {', '.join(twice)} is there more than once. Keep one run of each seed.")


# Keys that say where and how a run is kept and logged, and texts that follow from other keys.
UNSAID = (
    "run_dir", "name", "resume", "stop_after", "baseline", "logging", "checkpoint", "debug.profile",
    "data.prepared", "data.workers", "precision.description", "precision.source", "precision.knobs",
)  # fmt: skip


def config_differences(one: Run, other: Run) -> dict[str, tuple[Any, Any]]:
    """Dotted keys in which two configurations differ, with both values; where files go and what is logged left out."""
    first, second = dict(_flat(one.config or {})), dict(_flat(other.config or {}))
    keys = [
        key
        for key in dict.fromkeys([*first, *second])
        if not any(key == place or key.startswith(place + ".") for place in UNSAID)
    ]
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and leaf values, in order; lists stay whole."""
    found: list[tuple[str, Any]] = []
    for key, value in mapping.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return found
