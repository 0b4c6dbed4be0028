"""Overrides of the command line, checked against the schema before Hydra sees them. No torch here.

`group=choice` picks a file of `configs/`; `key=value` sets one value. A key that the schema does not have is refused,
even with Hydra's `+`: it would reach nothing. Value overrides are handed on as Hydra's `++`: a key of the schema can
be set whether or not a YAML file happens to mention it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.schema import did_you_mean, key_types, shown, unknown_key, wanted

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True)
class Groups:
    """The choices of every configuration group, from `configs/` and from folders of the user's own.

    Attributes:
        folders: where they were found, `configs/` first.
        options: group name -> its choices in alphabetical order.
    """

    folders: tuple[Path, ...]
    options: dict[str, tuple[str, ...]]


def find_groups(config_dirs: Sequence[str | Path] = ()) -> Groups:
    """Lists the groups of `configs/` with what `config_dirs` add.

    Raises ConfigError for a folder that does not exist, and for two files of one name, since one would hide the other.
    """
    folders = [CONFIGS]
    for folder in config_dirs:
        path = Path(folder).expanduser().absolute()
        if not path.is_dir():
            raise ConfigError(
                f"--config-dir {folder}: there is no such folder. It holds files such as precision/mine.yaml, "
                "which are then chosen with precision=mine."
            )
        folders.append(path)
    names = sorted({file.parent.name for folder in folders for file in folder.glob("*/*.yaml")})
    options: dict[str, tuple[str, ...]] = {}
    for name in names:
        owner: dict[str, Path] = {}
        for folder in folders:
            for file in sorted((folder / name).glob("*.yaml")):
                if file.stem in owner:
                    raise ConfigError(
                        f"{file}: {owner[file.stem]} has the same name, and one would hide the other. Rename yours."
                    )
                owner[file.stem] = file
        options[name] = tuple(sorted(owner))
    return Groups(tuple(folders), options)


def parse(texts: Sequence[str]) -> list[Override]:
    """Parses overrides by Hydra's grammar; ConfigError with the offending text for what is no override."""
    parser = OverridesParser.create()
    parsed = []
    for text in texts:
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(f"{text!r} is no override: write key=value, for example steps=100 or precision=nvfp4.")
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            quoted = _quoted(text)
            if quoted is not None:
                parsed.append(parser.parse_override(quoted))
                continue
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{text}: cannot be read ({reason}). Quote values with spaces, commas or brackets, "
                f"for example 'data.path=\"my file.txt\"'."
            ) from None
    return parsed


def _quoted(text: str) -> str | None:
    """`key='value'` for a key that holds text, such as a path with `~`, which Hydra's grammar can't read; else None."""
    start, _, value = text.partition("=")
    quote = next((mark for mark in "'\"" if mark not in value), None)
    hint = key_types(RunConfig).get(start.lstrip("+"))
    if quote is None or not _holds_text(hint) or value.startswith(("[", "{")) or value.endswith("\\"):
        return None
    return f"{start}={quote}{value}{quote}"


def _holds_text(hint: Any) -> bool:
    """Whether a key's type is text, or text or nothing."""
    accepts = set(get_args(hint)) or {hint}
    return str in accepts and not accepts & {int, float}


def checked(texts: Sequence[str], groups: Groups) -> list[str]:
    """The overrides in the form that is handed to Hydra. Raises ConfigError for whatever the schema does not have."""
    return [_checked_one(override, groups) for override in parse(texts)]


def _checked_one(override: Override, groups: Groups) -> str:
    key, text = override.key_or_group, override.input_line or ""
    if override.package is not None:
        raise ConfigError(f"{text}: packages (@) are not used here; write {key}=... .")
    if key.split(".")[0].split("/")[0] == "hydra":
        raise ConfigError(f"{text}: settings of Hydra itself are fixed here. The run folder is set by run_dir=PATH.")
    if override.is_sweep_override():
        raise ConfigError(
            f"{text}: several values are several runs: add --multirun. If one list is meant, write {key}=[...]."
        )
    if key in groups.options:
        return f"~{key}" if override.is_delete() else _checked_choice(key, override, groups)
    hint = key_types(RunConfig).get(key)
    if hint is None:
        raise _unknown(key, groups)
    if override.is_delete():
        return f"~{key}"
    value = override.value()
    if _is_list(hint) and not isinstance(value, list) and not _refers(value):  # Hydra's message shows the ++
        raise ConfigError(f"{key}: wanted {wanted(hint)}, got {shown(value)}. Write {key}=[...].")
    return f"++{key}={_as_typed(override, hint)}"


def _is_list(hint: Any) -> bool:
    """Whether a key holds a list of any length, and nothing else."""
    return get_origin(hint) is tuple and Ellipsis in get_args(hint)


def _refers(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _checked_choice(group: str, override: Override, groups: Groups) -> str:
    options, choice = groups.options[group], override.value()
    if choice is None and group == "experiment":
        return f"~{group}"
    if isinstance(choice, (str, int)) and not isinstance(choice, bool) and override.get_value_string() in options:
        return f"{group}={override.get_value_string()}"
    if isinstance(choice, dict):
        raise ConfigError(f"{group}: is set by a name ({', '.join(options)}) or key by key, as in {group}.KEY=VALUE.")
    name = override.get_value_string()
    listing = ", ".join(options)
    own = " A file of your own is found through --config-dir."
    if len(groups.folders) > 1:
        own = f" Looked for {group}/{name}.yaml in {', '.join(map(str, groups.folders[1:]))} too."
    raise ConfigError(
        f"{group}={name}: there is no such {group}.{did_you_mean(name, options)} There are: {listing}.{own}"
    )


def _unknown(key: str, groups: Groups) -> ConfigError:
    if "/" in key:
        return ConfigError(f"{key}: there is no such group. There are: {', '.join(groups.options)}.")
    above = key
    while "." in above:
        above = above.rpartition(".")[0]
        hint = key_types(RunConfig).get(above)
        if hint is not None and any(arg is Ellipsis for arg in get_args(hint)):
            return ConfigError(f"{key}: {above} is a list and is set whole, as in {above}=[{{...}}].")
    if "." not in key:
        near = did_you_mean(key, [*groups.options, *key_types(RunConfig)])
        return ConfigError(f"{key}: there is no such key or group.{near}") if near else unknown_key(key, RunConfig)
    return unknown_key(key, RunConfig)


def _as_typed(override: Override, hint: Any) -> str:
    """The value's text; what was typed for a text is kept as typed (`name=2024_01` is no number)."""
    text, value = override.get_value_string(), override.value()
    if _holds_text(hint) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"'{text}'"
    return text


def expand_sweeps(texts: Sequence[str]) -> Iterator[list[str]]:
    """Every combination of the values that the overrides list (`seed=1,2`), as lists of plain overrides, in order."""
    choices: list[list[str]] = []
    for override in parse(texts):
        if not override.is_sweep_override():
            choices.append([override.input_line or ""])
        elif override.is_discrete_sweep():
            start = (override.input_line or "").partition("=")[0]
            choices.append([f"{start}={value}" for value in override.sweep_string_iterator()])
        else:
            raise ConfigError(
                f"{override.input_line}: wanted a list of values or range(...), got {shown(override.input_line)}."
            )
    for combination in product(*choices):
        yield list(combination)
