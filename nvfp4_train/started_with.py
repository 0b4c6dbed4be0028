"""What every rank must have been started with, compared, and what to say of a rank that was not. No torch here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and leaf values of nested mappings, in order."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """What to say, after its name, of a rank whose flat settings `theirs` are not those of rank 0, `mine`."""
    keys = sorted(key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key))
    return other_values(f"{key} ({theirs.get(key)} there, {mine.get(key)} on rank 0)" for key in keys)


def other_values(keys: Iterable[str]) -> str:
    """What to say, after its name, of a rank that is not like rank 0 in `keys`."""
    return (
        f"was started with another value of {', '.join(keys)} than rank 0: "
        "give every rank the same command line, versions and files"
    )


def settings_hash(settings: Mapping[str, Any]) -> str:
    """The same for the same settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
