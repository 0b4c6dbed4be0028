"""From YAML files and overrides to the one `RunConfig` of a run. No torch here.

Hydra composes; the schema decides. Nothing of Hydra is left behind: no global state, no folders, no logging.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from nvfp4_train.checks import check_values, value_at
from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.overrides import CONFIGS, checked, find_groups
from nvfp4_train.precision.config import PrecisionConfig
from nvfp4_train.schema import did_you_mean, from_mapping, key_types, unknown_key

# Keys that YAML files share among themselves and that are no part of a run: recipes refer to them.
AUTHORING_KEYS = ("four_bit_blocks",)

# Keys that hold a path, with the words that are no path; `*` stands for anything.
PATH_KEYS: dict[str, tuple[str, ...]] = {
    "run_dir": (),
    "resume": ("auto", "never"),
    "baseline": (),
    "data.path": ("builtin", "packages", "hub:*"),
    "data.prepared": (),
    "data.tokenizer": ("byte", "hub:*"),
    "tokenizer.train": (),
}


def compose(
    overrides: Sequence[str] = (), config_dirs: Sequence[str | Path] = (), base: str | Path | None = None
) -> RunConfig:
    """The configuration of a run from overrides as they are typed on the command line.

    Args:
        overrides: `key=value` and `group=choice`.
        config_dirs: folders with YAML files of the user's own, laid out as `configs/`.
        base: the folder that relative paths start from; by default the present one.

    Raises ConfigError for unknown keys, wrong types, missing values, values out of range and interpolations that lead
    nowhere.
    """
    groups = find_groups(config_dirs)
    texts = checked(overrides, groups)
    if config_dirs:
        search = ",".join(f"'file://{folder}'" for folder in groups.folders[1:])
        texts = [f"hydra.searchpath=[{search}]", *texts]
    mapping, choices = _composed(texts)
    if mapping.get("name") is None:
        mapping["name"] = choices.get("experiment") or choices["model"]
    config = with_absolute_paths(from_mapping(RunConfig, mapping), Path(base) if base else Path.cwd())
    _check_name(config.precision.name, choices.get("precision"))
    check_values(config)
    return config


def compose_precision(
    name: str, overrides: Sequence[str] = (), config_dirs: Sequence[str | Path] = ()
) -> PrecisionConfig:
    """One recipe by name, with `precision.KEY=VALUE` overrides, outside any experiment."""
    return compose([f"precision={name}", *overrides], config_dirs).precision


def _composed(texts: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Hydra's result with every interpolation resolved, and which file was chosen in each group."""
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3", job_name="nvfp4_train"):
            config = hydra_compose("config", overrides=texts, return_hydra_config=True)
        choices = dict(config.hydra.runtime.choices)
        mine = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        mapping = _resolved(mine)
    except MissingConfigException as error:
        raise _missing_choice(error) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_short(error)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"A configuration file is no YAML: {' '.join(str(error).split())}") from error
    for key in AUTHORING_KEYS:
        mapping.pop(key, None)
    _check_packages(mapping, choices)
    return mapping, choices


def _missing_choice(error: MissingConfigException) -> ConfigError:
    """Of a file's `defaults`; what is chosen on the command line was looked up before."""
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    options = error.options or []
    listing = f" There are: {', '.join(options)}." if options else ""
    return ConfigError(
        f"{group}={name}: the defaults of a chosen file ask for it, and there is no such {group or 'file'}."
        f"{did_you_mean(name, options)}{listing}"
    )


def _check_packages(mapping: dict[str, Any], choices: Mapping[str, Any]) -> None:
    """That the keys of an experiment are those of the run, and not below their group."""
    for group in ("experiment", "debug"):
        found = mapping.get(group)
        astray = [key for key in found if key in key_types(RunConfig)] if isinstance(found, dict) else []
        if astray:
            raise ConfigError(
                f"{group}={choices.get(group)}: its keys came out as {group}.{astray[0]} and so on. Begin the file "
                "with the line `# @package _global_`, and they are those of the run."
            )


def _check_name(name: str, choice: str | None) -> None:
    """That a recipe of the user's own, which begins as a copy, is not called as another one."""
    if name != choice and (CONFIGS / "precision" / f"{name}.yaml").is_file():
        raise ConfigError(
            f"precision={choice}: calls itself {name}, which is another recipe, and its runs would pass for that one's."
            f" Write name: {choice} in its file."
        )


def _misspelt(mapping: Mapping[Any, Any], path: str = "") -> str | None:
    """The first dotted key of the files that the schema does not have, None where it has all."""
    known = key_types(RunConfig)
    for key, value in mapping.items():
        dotted = f"{path}{key}"
        if dotted in AUTHORING_KEYS:
            continue
        if dotted not in known:
            return dotted
        below = _misspelt(value, f"{dotted}.") if isinstance(value, Mapping) else None
        if below:
            return below
    return None


def _resolved(config: DictConfig) -> dict[str, Any]:
    try:
        mapping = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except InterpolationKeyError as error:
        misspelt = _misspelt(OmegaConf.to_container(config, resolve=False))  # type: ignore[arg-type]
        if misspelt:  # what is referred to may be there under this name
            raise unknown_key(misspelt, RunConfig) from None
        missing = str(error).partition("'")[2].partition("'")[0]
        near = did_you_mean(missing, key_types(RunConfig).keys() - {missing})
        raise ConfigError(f"{error.full_key}: refers to ${{{missing}}}, which does not exist.{near}") from None
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: has no value yet. Set it: {error.full_key}=... .") from None
    assert isinstance(mapping, dict)
    return {str(key): value for key, value in mapping.items()}


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__
    if cause is not None and str(cause) not in str(error):
        lines.append(str(cause).splitlines()[0])
    return " ".join(lines[:4])


def with_absolute_paths(config: RunConfig, base: Path) -> RunConfig:
    """The configuration with every path absolute: `~` expanded, relative ones starting from `base`."""
    found: dict[str, Any] = {}
    for key, words in PATH_KEYS.items():
        found[key] = _absolute(value_at(config, key), words, base, key)
    sources = tuple(
        dataclasses.replace(source, path=_absolute(source.path, PATH_KEYS["data.path"], base, "data.sources") or "")
        for source in config.data.sources
    )
    return replaced(config, found | {"data.sources": sources})


def _absolute(value: str | None, words: Sequence[str], base: Path, key: str) -> str | None:
    if value is None or any(fnmatch(value, word) for word in words):
        return value
    if not value.strip():
        raise ConfigError(f"{key}: wanted a path, got an empty text. Leave the key out for its default.")
    return os.path.abspath(base / Path(value).expanduser())


def replaced(config: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a frozen configuration with the values of some dotted keys exchanged."""
    inner: dict[str, dict[str, Any]] = {}
    direct: dict[str, Any] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            direct[name] = value
    for name, rest_values in inner.items():
        direct[name] = replaced(getattr(config, name), rest_values)
    return dataclasses.replace(config, **direct)
