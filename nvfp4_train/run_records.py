"""The small files of a run folder: what each holds, and what is said of one that is damaged. No torch here."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml

from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.schema import from_mapping
from nvfp4_train.storage import write_atomic

CONFIG, ENVIRONMENT, PRECISION, BRANCH = "config.yaml", "environment.json", "precision.json", "branch.json"
_BRANCH_KEYS = {"run": str, "checkpoint": str, "step": int}
_RESTORE = f"Restore it (the run's own command with --cfg job prints a {CONFIG}), or train again in another run_dir."


def load_config(path: Path) -> RunConfig:
    """The configuration of the run in a folder. Raises ConfigError where there is none or it can't be read."""
    file = path / CONFIG
    try:
        mapping = yaml.safe_load(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{path}: is no run folder: there is no {file}. A run folder is what training made: its run_dir, "
            "by default runs/NAME-PRECISION-DATE-TIME-XXXX. Give that folder, not one above or below it."
        ) from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}. Make it readable, or name another run folder.") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" at line {error.problem_mark.line + 1}"
        raise ConfigError(f"{file}: is damaged{line} ({error.problem or 'no YAML'}). {_RESTORE}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is damaged ({str(error).splitlines()[0]}). {_RESTORE}") from None
    if not isinstance(mapping, dict):
        raise ConfigError(f"{file}: is damaged (it holds no keys). {_RESTORE}")
    try:
        return from_mapping(RunConfig, mapping)
    except ValueError as error:
        raise ConfigError(f"{file}: was written by another version or changed by hand: {error} {_RESTORE}") from None


def has_begun(path: Path) -> bool:
    """Whether a run in this folder took a step; one that came to none left nothing, and its settings may change."""
    metrics = path / "metrics.jsonl"
    checkpoints = path / "checkpoints"
    done = (metrics.exists() and metrics.stat().st_size > 0) or (checkpoints.exists() and any(checkpoints.iterdir()))
    return done and (path / CONFIG).exists()


def claim(path: Path) -> None:
    """Makes the folder of a run, or sees that it is empty or holds a run; ConfigError for anything else."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run_dir={path}: is a file. Name a folder that is new, empty or holds this run.")
    path.mkdir(parents=True, exist_ok=True)
    others = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    if not others or has_begun(path) or _holds_config(path):
        return
    there = (path / CONFIG).exists()  # many programs have a file of this name
    why = f"{CONFIG} is of no run" if there else f"{CONFIG} is missing"
    restore = (
        "" if there or not {"checkpoints", "metrics.jsonl"} & set(others) else f" If it was a run, restore {CONFIG}."
    )
    listing = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    raise ConfigError(
        f"run_dir={path}: is not empty ({listing}) and holds no run ({why}). Nothing there is overwritten: name a "
        f"folder that is new, empty or holds this run.{restore}"
    )


def _holds_config(path: Path) -> bool:
    try:
        load_config(path)
    except ConfigError:
        return False
    return True


def read_branch(path: Path) -> dict[str, Any] | None:
    """Where a branch came from (`run`, `checkpoint`, `step`), None for a run that is none.

    Raises:
        ConfigError: the file is damaged. A run whose origin is unknown must not pass for one that began at step 0.
    """
    file = path / BRANCH
    try:
        branch = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _damaged_branch(file, str(error)) from None
    if not isinstance(branch, dict):
        raise _damaged_branch(file, "it holds no keys")
    for key, kind in _BRANCH_KEYS.items():
        if type(branch.get(key)) is not kind:
            raise _damaged_branch(file, f"{key} is {branch.get(key)!r}")
    return branch


def _damaged_branch(file: Path, reason: str) -> ConfigError:
    form = '{"run": "RUN_DIR", "checkpoint": "RUN_DIR/checkpoints/step-00000100", "step": 100}'
    return ConfigError(
        f"{file}: is damaged ({reason}), so where this branch began is not known. Write it again, as in {form}, "
        "or start the branch anew with resume=PATH in another run_dir."
    )


def write_environment(path: Path, environment: dict[str, Any], start: dict[str, Any]) -> list[str]:
    """Writes the environment of this start, with one entry for every start so far.

    It is a log alone: a damaged one is begun anew, and the lines to print say so.
    """
    file = path / ENVIRONMENT
    starts: list[Any] = []
    notes: list[str] = []
    try:
        starts = json.loads(file.read_text())["starts"]
        if not isinstance(starts, list):
            raise ValueError(f"starts is {starts!r}")
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError) as error:
        starts = []
        notes.append(f"{file} was damaged ({type(error).__name__}: {error}); it begins anew with this start")
    shared = {key: environment.get(key) for key in ("host", "device", "world_size", "commit")}
    entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **start, **shared}
    write_atomic(file, json.dumps({**environment, "starts": [*starts, entry]}, indent=1) + "\n")
    return notes
