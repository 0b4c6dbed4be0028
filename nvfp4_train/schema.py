"""From plain mappings to the frozen dataclasses of a configuration, and back. No torch here.

Strict on purpose: a key that no dataclass has, a value of another type, a missing key, NaN: each is refused with the
dotted key, the value and what to write instead. Nothing is converted but what loses nothing: an integral float where an
integer is wanted (`steps=1e3`), an integer where a float is wanted, a list where a tuple is wanted.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import yaml

from nvfp4_train.config import ConfigError


@cache
def fields_of(cls: type) -> dict[str, Any]:
    """Field names of a dataclass with their resolved types, in order of definition."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@cache
def key_types(cls: type, path: str = "") -> dict[str, Any]:
    """Every dotted key that a configuration of `cls` has, inner nodes included, with its type. Lists end the path."""
    found: dict[str, Any] = {}
    for name, hint in fields_of(cls).items():
        key = f"{path}.{name}" if path else name
        found[key] = hint
        if dataclasses.is_dataclass(hint):
            found.update(key_types(cast(type, hint), key))
    return found


def leaf_types(cls: type) -> dict[str, Any]:
    """The keys of `key_types` that hold a value rather than further keys."""
    return {key: hint for key, hint in key_types(cls).items() if not dataclasses.is_dataclass(hint)}


def near_misses(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known dotted keys that look most like `word`, best first: the last part decides, the rest breaks ties."""
    parent, _, last = word.rpartition(".")
    scored = []
    for key in dict.fromkeys(known):  # a group and a key may share a name
        other_parent, _, other_last = key.rpartition(".")
        alike = difflib.SequenceMatcher(None, last.lower(), other_last.lower()).ratio()
        if alike >= 0.7:
            scored.append((0.7 * alike + 0.3 * difflib.SequenceMatcher(None, parent, other_parent).ratio(), key))
    best = max((score for score, _ in scored), default=0.0)
    ranked = sorted((pair for pair in scored if pair[0] >= best - 0.15), key=lambda pair: -pair[0])
    return [key for _, key in ranked[:count]]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean a, b or c?`, or nothing where nothing is near."""
    near = near_misses(word, known)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def unknown_key(key: str, cls: type) -> ConfigError:
    """The error for a dotted key that `cls` does not have."""
    parent = key.rpartition(".")[0]
    types_by_key = key_types(cls)
    hint = did_you_mean(key, types_by_key)
    siblings = [name for name in types_by_key if name.rpartition(".")[0] == parent]
    if not hint and siblings:
        where = f"{parent} has" if parent else "There are"
        hint = f" {where}: {', '.join(name.rpartition('.')[2] for name in siblings)}."
    return ConfigError(f"{key}: there is no such key.{hint}")


def from_mapping[T](cls: type[T], mapping: Any, path: str = "") -> T:
    """Builds the frozen dataclass `cls` from a plain mapping, nested ones included.

    `path` is the dotted key at which the mapping stands, for messages. Raises ConfigError, naming the full dotted key,
    for an unknown or missing key, a value of another type, and NaN or infinity; an error of the dataclass's own check
    is passed on with the key before it.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{path or 'configuration'}: wanted keys and values, got {shown(mapping)}.")
    prefix = f"{path}." if path else ""
    hints = fields_of(cast(type, cls))
    for key in mapping:
        if key not in hints:
            siblings = [f"{prefix}{name}" for name in hints]
            hint = did_you_mean(f"{prefix}{key}", siblings) or f" Known here: {', '.join(hints)}."
            raise ConfigError(f"{prefix}{key}: there is no such key.{hint}")
    check = getattr(cls, "check_mapping", None)  # what a class wants judged before its parts are built
    if check is not None:
        check(mapping)
    values = {name: convert(mapping[name], hint, f"{prefix}{name}") for name, hint in hints.items() if name in mapping}
    for field in dataclasses.fields(cast(Any, cls)):
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.name not in values and not has_default:
            raise ConfigError(f"{prefix}{field.name}: missing; wanted {wanted(hints[field.name])}.")
    try:
        return cls(**values)
    except ValueError as error:  # the dataclass's own check, which does not know where it stands
        if not path or path in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


def convert(value: Any, hint: Any, key: str) -> Any:
    """One value as the type `hint`, or a ConfigError that names key, value and the wanted type."""
    if dataclasses.is_dataclass(hint):
        return from_mapping(cast(type, hint), value, key)
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        return _convert_tuple(value, args, key, hint)
    options = list(args) if origin in (Union, types.UnionType) else [hint]
    if value is None and type(None) in options:
        return None
    nested = [option for option in options if dataclasses.is_dataclass(option) or get_origin(option) is tuple]
    if nested and isinstance(value, (Mapping, list, tuple)):
        return convert(value, nested[0], key)
    if isinstance(value, bool) or value is None:
        if bool in options and value is not None:
            return value
    elif isinstance(value, int):
        if int in options:
            return value
        if float in options:
            return float(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{key}: wanted {wanted(hint)}, got {value}, which is no finite number.")
        if int in options and value.is_integer():
            return int(value)
        if float in options:
            return value
    elif isinstance(value, str) and str in options:
        return value
    raise ConfigError(f"{key}: wanted {wanted(hint)}, got {shown(value)}.{_advice(value, options)}")


def _convert_tuple(value: Any, args: tuple[Any, ...], key: str, hint: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{key}: wanted {wanted(hint)}, got {shown(value)}.")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(convert(item, args[0], f"{key}[{index}]") for index, item in enumerate(value))
    if len(value) != len(args):
        raise ConfigError(f"{key}: wanted {wanted(hint)}, got {len(value)} values: {shown(value)}.")
    pairs = zip(value, args, strict=True)
    return tuple(convert(item, option, f"{key}[{index}]") for index, (item, option) in enumerate(pairs))


def _advice(value: Any, options: list[Any]) -> str:
    if str in options and isinstance(value, bool):
        return " YAML reads yes, no, on, off, true and false as true or false: quote the word if you mean text."
    if str in options and isinstance(value, (int, float)):
        return " Quote it if you mean text."
    if isinstance(value, str) and value.lower() == "none" and type(None) in options:
        return " Write null for nothing."
    return ""


def wanted(hint: Any) -> str:
    """A type in words: `a whole number`, `text or null`."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if hint in names:
        return names[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return f"a list of {wanted(args[0]).removeprefix('a ')}s" if args[0] in names else "a list of {key: value}"
        return f"a list of {len(args)} ({', '.join(wanted(arg) for arg in args)})"
    if dataclasses.is_dataclass(hint):
        return f"keys and values ({', '.join(fields_of(cast(type, hint)))})"
    return " or ".join(dict.fromkeys(wanted(arg) for arg in args))


def shown(value: Any) -> str:
    """A value for a message: as YAML writes it, with its kind where that is the point."""
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a truth value)"
    if isinstance(value, str):
        return f"{value!r} (text)"
    if isinstance(value, (int, float)):
        return f"{value} (a number)"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).strip()
    return text if len(text) < 120 else text[:117] + "..."


def to_mapping(config: Any) -> dict[str, Any]:
    """A configuration as plain dictionaries, lists and scalars: what `from_mapping` reads back to an equal value."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def to_yaml(config: Any) -> str:
    """A configuration as YAML in the order of its schema; what is printed at start and saved as `config.yaml`."""
    return yaml.dump(to_mapping(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Lists of plain values in one line, `[1, 16]`."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.Node:
        scalars = not any(isinstance(item, (Mapping, list)) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=scalars)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Dotted keys at which two configurations of one class differ, each with (old, new). Lists of as many
    mappings are compared one by one (`data.sources[1].path`), others whole."""
    return dict(_differences(to_mapping(old), to_mapping(new), ""))


def _differences(old: Any, new: Any, path: str) -> Iterable[tuple[str, tuple[Any, Any]]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif _are_mappings(old) and _are_mappings(new) and len(old) == len(new):
        for i, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _differences(one, other, f"{path}[{i}]")
    elif old != new or type(old) is not type(new):
        yield path, (old, new)


def _are_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
