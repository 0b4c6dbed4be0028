"""The folder of a run: made for one run, continued by the same run alone, never overwritten by another. No torch here.

runs/quickstart-nvfp4-20260101-120000-3fa9/
    config.yaml         the configuration as used, every path absolute
    environment.json    versions, commit, host, device, world size, and a line for each start
    precision.json      what runs in which format, and why
    branch.json         in a branch alone: the run and step it started from
    metrics.jsonl       one line a step
    checkpoints/        see `checkpoint_files`
    wandb/
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import yaml

from nvfp4_train import checkpoint_files
from nvfp4_train.checkpoint_files import CheckpointError
from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.schema import differences, from_mapping, shown, to_yaml

CONFIG, ENVIRONMENT, PRECISION, BRANCH, LOCK = (
    "config.yaml",
    "environment.json",
    "precision.json",
    "branch.json",
    ".lock",
)

# What makes a run this run and no other, and the keys in there that only say how or where the same thing is done.
IDENTITY = ("model", "data", "optimizer", "schedule", "seed", "steps")
FREE_WITHIN_IDENTITY = ("model.recompute", "model.kernels", "data.prepared", "data.workers")
# Keys that differ by their nature between starts of one run, and texts that follow from other keys.
UNSAID = ("run_dir", "resume", "data.prepared", "precision.description", "precision.source", "precision.knobs")

_locks: list[TextIO] = []


@dataclass(frozen=True)
class RunFolder:
    """A run folder that is ready to train in, and what was decided about it.

    Attributes:
        path: the folder.
        config: the configuration with this folder in it.
        decision: fresh (start at step 0), resume (go on from `checkpoint`) or branch (start from another run's).
        checkpoint: the checkpoint folder to load, None where fresh.
        notes: lines to print: what differs from the last start, damaged checkpoints that were passed over.
    """

    path: Path
    config: RunConfig
    decision: str
    checkpoint: Path | None
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The step to go on from."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    @property
    def checkpoints(self) -> Path:
        """Where this run's checkpoints go."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The file of metrics."""
        return self.path / "metrics.jsonl"

    def announcement(self) -> str:
        """The text to print at start: what was decided, what differs, and the whole configuration as used."""
        origin = {"fresh": "a new run", "resume": "continues", "branch": "a branch"}[self.decision]
        start = "" if self.checkpoint is None else f" from step {self.step} of {self.checkpoint}"
        return "\n".join([f"run folder {self.path}: {origin}{start}", *self.notes, to_yaml(self.config).rstrip()])

    def write_precision(self, report: dict[str, Any]) -> None:
        """Writes the precision report."""
        write_atomic(self.path / PRECISION, json.dumps(report, indent=1) + "\n")


def prepare_run_folder(
    config: RunConfig,
    environment: dict[str, Any],
    is_main: bool = True,
    broadcast: Callable[[Any], Any] = lambda item: item,
) -> RunFolder:
    """Makes or takes over the run folder and says how to start. Called by every rank; the main one alone touches files.

    Args:
        config: `run_dir`, `resume` and the rest decide.
        environment: for `environment.json`.
        is_main: whether this rank decides.
        broadcast: given an item on each rank, returns the main rank's on all.

    Raises ConfigError or CheckpointError, on all ranks: the folder holds another run or no run at all, or there is
    nothing to resume.
    """
    outcome: RunFolder | Exception | None = None
    if is_main:
        try:
            outcome = _prepare(config, environment)
        except (ConfigError, CheckpointError) as error:
            outcome = error
        except OSError as error:
            outcome = ConfigError(f"run_dir={config.run_dir or './runs'}: {error.strerror}: {error.filename}")
    outcome = broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    assert isinstance(outcome, RunFolder)
    return outcome


def _prepare(config: RunConfig, environment: dict[str, Any]) -> RunFolder:
    if config.run_dir is None:
        path = _new_folder(Path.cwd() / "runs", f"{config.name}-{config.precision.name}")
        config = replace(config, run_dir=str(path))
    else:
        path = Path(config.run_dir)
        _claim(path)
    _lock(path)
    try:
        folder = _continued(path, config) if has_begun(path) else _fresh_or_branch(path, config)
        write_atomic(path / CONFIG, to_yaml(folder.config))
        _write_environment(folder, environment)
    except (ConfigError, CheckpointError):
        release_locks()
        _remove_if_unused(path)
        raise
    return folder


def _remove_if_unused(path: Path) -> None:
    """Takes away a folder that was made for a run which was then refused."""
    if [entry.name for entry in path.iterdir()] == [LOCK]:
        (path / LOCK).unlink()
        path.rmdir()


def _new_folder(parent: Path, name: str) -> Path:
    """A folder that did not exist before: two jobs that start in one second never share one."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        path = parent / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path


def _claim(path: Path) -> None:
    """Makes the folder, or sees that it is empty or holds a run."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run_dir={path}: is a file. Name a folder that is new, empty or holds this run.")
    path.mkdir(parents=True, exist_ok=True)
    others = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    if others and not (path / CONFIG).exists():
        listing = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ConfigError(
            f"run_dir={path}: is not empty ({listing}) and holds no run ({CONFIG} is missing). Nothing there is "
            "overwritten: name a folder that is new, empty or holds this run."
        )


def _lock(path: Path) -> None:
    """Holds the folder as long as this process lives. File systems without locks are left alone."""
    file = open(path / LOCK, "a+")  # noqa: SIM115 (held open on purpose)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"run_dir={path}: another process is training in this folder. Wait for it, or name another folder."
        ) from None
    except OSError:
        file.close()
        return
    _locks.append(file)


def has_begun(path: Path) -> bool:
    """Whether a run in this folder took a step; one that came to none left nothing, and its settings may change."""
    metrics = path / "metrics.jsonl"
    checkpoints = path / "checkpoints"
    done = (metrics.exists() and metrics.stat().st_size > 0) or (checkpoints.exists() and any(checkpoints.iterdir()))
    return done and (path / CONFIG).exists()


def release_locks() -> None:
    """Lets go of the folders that this process holds; leaving the process does the same."""
    while _locks:
        _locks.pop().close()


def _fresh_or_branch(path: Path, config: RunConfig) -> RunFolder:
    if config.resume in ("auto", "never"):
        return RunFolder(path, config, "fresh", None)
    parent, checkpoint, notes = _source(Path(config.resume))
    changed = differences(load_config(parent).model, config.model)
    blocking = {f"model.{key}": pair for key, pair in changed.items() if f"model.{key}" not in FREE_WITHIN_IDENTITY}
    if blocking:
        raise ConfigError(
            f"resume={config.resume}: holds another model, and a branch takes its weights over:\n{_listing(blocking)}"
        )
    step = step_of(checkpoint)
    write_atomic(
        path / BRANCH, json.dumps({"run": str(parent), "checkpoint": str(checkpoint), "step": step}, indent=1) + "\n"
    )
    return RunFolder(path, config, "branch", checkpoint, tuple(notes))


def _source(source: Path) -> tuple[Path, Path, list[str]]:
    """Run folder and checkpoint that a path means: a checkpoint's, or a run folder's newest whole one."""
    if source.is_dir() and source.name.startswith(checkpoint_files.PREFIX):
        problem = checkpoint_files.damage(source)
        if problem:
            raise CheckpointError(f"resume={source}: {problem}. Name another checkpoint of the run.")
        return source.parent.parent, source, []
    if source.name == "checkpoints":
        source = source.parent
    if not source.is_dir():
        raise ConfigError(
            f"resume={source}: there is no such folder. Write auto, never, a run folder or a checkpoint's."
        )
    if not (source / CONFIG).exists():
        raise ConfigError(f"resume={source}: is neither a run folder nor a checkpoint's ({CONFIG} is missing).")
    checkpoint, problems = checkpoint_files.newest_whole(source / "checkpoints")
    if checkpoint is None:
        raise ConfigError(f"resume={source}: this run has no checkpoint yet.")
    return source, checkpoint, [f"passed over {problem}" for problem in problems]


def _continued(path: Path, config: RunConfig) -> RunFolder:
    if config.resume == "never":
        raise ConfigError(
            f"run_dir={path}: holds a run, and resume=never. Name another run_dir, or go on with resume=auto."
        )
    old = load_config(path)
    changed = differences(old, config)
    blocking = {key: pair for key, pair in changed.items() if _is_identity(key)}
    if blocking:
        raise ConfigError(
            f"run_dir={path}: holds another run; these may not change when it goes on:\n{_listing(blocking)}\n"
            "Name another run_dir for a new run, with resume=PATH if it is to start from this one's weights."
        )
    notes = _changes(changed)
    checkpoint, problems = checkpoint_files.newest_whole(path / "checkpoints")
    notes += [f"passed over {problem}" for problem in problems]
    branch = read_branch(path)
    if config.resume not in ("auto", "never"):
        _check_named(path, config, checkpoint, branch)
    if checkpoint is not None:
        return RunFolder(path, config, "resume", checkpoint, tuple(notes))
    if branch is not None:
        return RunFolder(path, config, "branch", Path(branch["checkpoint"]), tuple(notes))
    return RunFolder(path, config, "fresh", None, tuple(notes))


def _check_named(path: Path, config: RunConfig, newest: Path | None, branch: dict[str, Any] | None) -> None:
    """resume=PATH into a folder that holds a run: its own newest checkpoint, or the one that the branch came from."""
    named = Path(config.resume)
    if named in (path, path / "checkpoints") or (newest is not None and named == newest):
        return
    if path in named.parents:
        raise ConfigError(
            f"resume={named}: is not the newest checkpoint of its run, and a run does not go back over its later ones. "
            "Name another run_dir, and it becomes a branch that starts there."
        )
    if branch is None or named not in (Path(branch["run"]), Path(branch["checkpoint"])):
        of = f"a branch of {branch['checkpoint']}" if branch else "a run that is no branch"
        raise ConfigError(
            f"run_dir={path}: holds {of}, so it can't become a branch of {named}. Name another run_dir, or resume=auto."
        )


def _is_identity(key: str) -> bool:
    return key.split(".")[0] in IDENTITY and key not in FREE_WITHIN_IDENTITY


def _changes(changed: dict[str, tuple[Any, Any]]) -> list[str]:
    """One line for each key that differs from the last start; one for the whole recipe where its name does."""
    if "precision.name" in changed:
        other = {key: pair for key, pair in changed.items() if not key.startswith("precision.")}
        changed = {"precision": changed["precision.name"], **other}
    said = {key: pair for key, pair in changed.items() if not key.startswith(UNSAID)}
    return [f"{key} was {_brief(old)}, is {_brief(new)} from here on" for key, (old, new) in said.items()]


def _listing(changed: dict[str, tuple[Any, Any]]) -> str:
    return "\n".join(f"  {key}: {_brief(old)} there, {_brief(new)} here" for key, (old, new) in changed.items())


def _brief(value: Any) -> str:
    return shown(value).removesuffix(" (text)").removesuffix(" (a number)").removesuffix(" (a truth value)")


def load_config(path: Path) -> RunConfig:
    """The configuration of the run in a folder. Raises ConfigError where there is none or it can't be read."""
    file = path / CONFIG
    try:
        mapping = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}. A run folder holds {CONFIG}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is damaged ({str(error).splitlines()[0]}).") from None
    try:
        return from_mapping(RunConfig, mapping)
    except ValueError as error:
        raise ConfigError(f"{file}: was written by another version or changed by hand: {error}") from None


def read_branch(path: Path) -> dict[str, Any] | None:
    """Where a branch came from (`run`, `checkpoint`, `step`), None for a run that is none."""
    file = path / BRANCH
    return json.loads(file.read_text()) if file.exists() else None


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(checkpoint.name.removeprefix(checkpoint_files.PREFIX))


def _write_environment(folder: RunFolder, environment: dict[str, Any]) -> None:
    """The environment of this start, with one line for every start so far."""
    file = folder.path / ENVIRONMENT
    starts = json.loads(file.read_text())["starts"] if file.exists() else []
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "decision": folder.decision,
        "step": folder.step,
        "host": environment.get("host"),
        "device": environment.get("device"),
        "world_size": environment.get("world_size"),
        "commit": environment.get("commit"),
        "changes": list(folder.notes),
    }
    write_atomic(file, json.dumps({**environment, "starts": [*starts, start]}, indent=1) + "\n")


def write_atomic(path: Path, text: str) -> None:
    """Writes a file whole or not at all: another name, flushed to the disk, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
