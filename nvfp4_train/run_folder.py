"""The folder of a run: made for one run, continued by the same run alone, never overwritten by another. No torch here.

`prepare_run_folder` decides and writes nothing; `RunFolder.record` writes, once everything else is set up. A start that
is refused, or that has no step left to take, leaves every file as it was.

runs/quickstart-nvfp4-20260101-120000-3fa9/
    config.yaml         the configuration as used, every path absolute
    environment.json    versions, commit, host, device, world size, and a line for each start
    precision.json      what runs in which format, and why
    data.json           what is read: see `data.record`
    branch.json         in a branch alone: the run and step it started from
    metrics.jsonl       one line a step
    checkpoints/        see `checkpoints.files`
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

from nvfp4_train.checkpoints import files as checkpoint_files
from nvfp4_train.checkpoints.files import CheckpointError
from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.run_records import (
    BRANCH,
    CONFIG,
    ENVIRONMENT,
    PRECISION,
    claim,
    has_begun,
    load_config,
    read_branch,
    write_environment,
)
from nvfp4_train.schema import differences, shown, to_mapping, to_yaml
from nvfp4_train.storage import refusal, temporary_of, write_atomic

LOCK = ".lock"

# What makes a run this run and no other, and the keys in there that only say how or where the same thing is done.
IDENTITY = ("model", "data", "optimizer", "schedule", "seed", "steps")
FREE_WITHIN_IDENTITY = (
    "model.recompute",
    "model.kernels",
    "data.prepared",
    "data.workers",
    "data.processes",
    "data.stream",
)
# Keys that differ by their nature between starts of one run, and texts that follow from other keys.
UNSAID = ("run_dir", "resume", "data.prepared", "precision.description", "precision.source", "precision.knobs")
_FROM_HERE = " from here on"

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
        branch: of a branch: the run, checkpoint and step it started from.
        made: folders that this start made, innermost first.
    """

    path: Path
    config: RunConfig
    decision: str
    checkpoint: Path | None
    notes: tuple[str, ...] = ()
    branch: dict[str, Any] | None = None
    made: tuple[Path, ...] = ()

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

    @property
    def first_step(self) -> int:
        """The step of the first line of metrics."""
        return 1 if self.branch is None else int(self.branch["step"]) + 1

    def nothing_to_do(self) -> str | None:
        """Why this start takes no step, None where it takes some. Nothing may be written then."""
        if self.step >= self.config.steps:
            why = f"this run is complete: {self.step} of {self.config.steps} steps"
        elif self.config.stop_after is not None and self.step >= self.config.stop_after:
            why = f"stopped after step {self.step}, as asked (stop_after={self.config.stop_after})"
        else:
            return None
        ignored = [
            f"not taken over: {note.removesuffix(_FROM_HERE)}" for note in self.notes if note.endswith(_FROM_HERE)
        ]
        return "\n".join([f"run folder {self.path}: {why}; nothing is written", *ignored])

    def announcement(self) -> str:
        """The text to print at start: what was decided, and what differs."""
        origin = {"fresh": "a new run", "resume": "continues", "branch": "a branch"}[self.decision]
        if self.decision != "resume" and self.metrics.is_file() and self.metrics.stat().st_size:
            origin += ", once more, for it has no checkpoint: the steps in its metrics.jsonl are trained again"
        start = "" if self.checkpoint is None else f" from step {self.step} of {self.checkpoint}"
        return "\n".join([f"run folder {self.path}: {origin}{start}", *self.notes])

    def record(self, environment: dict[str, Any], precision: dict[str, Any]) -> str:
        """Writes what this start is: configuration, environment, precision report, origin of a branch.

        Returns:
            The text to print: the whole configuration as used, after what there is to say of the files.
        """
        config = to_yaml(self.config)
        begun = has_begun(self.path)
        if not begun:  # first: without it the other files would pass for a stranger's
            write_atomic(self.path / CONFIG, config)
        if self.branch is None:
            (self.path / BRANCH).unlink(missing_ok=True)  # of a branch that came to no step
        else:
            write_atomic(self.path / BRANCH, json.dumps(self.branch, indent=1) + "\n")
        write_atomic(self.path / PRECISION, json.dumps(precision, indent=1) + "\n")
        start = {"decision": self.decision, "step": self.step, "changes": list(self.notes)}
        notes = write_environment(self.path, environment, start)
        if begun:  # last: a run that goes on keeps its configuration until all else is written
            write_atomic(self.path / CONFIG, config)
        return "\n".join([*notes, config.rstrip()])

    def leave(self) -> None:
        """Lets go of the folder, and takes it away where this start made it and left nothing in it."""
        _remove_if_unused(self.path, self.made)
        release_locks()


def prepare_run_folder(
    config: RunConfig,
    is_main: bool = True,
    broadcast: Callable[[Any], Any] = lambda item: item,
) -> RunFolder:
    """Makes or takes over the run folder and says how to start. Called by every rank; the main one alone touches files.

    Args:
        config: `run_dir`, `resume` and the rest decide.
        is_main: whether this rank decides.
        broadcast: given an item on each rank, returns the main rank's on all.

    Raises ConfigError or CheckpointError, on all ranks: the folder holds another run or no run at all, or there is
    nothing to resume.
    """
    outcome: RunFolder | Exception | None = None
    if is_main:
        try:
            outcome = _prepare(config)
        except (ConfigError, CheckpointError) as error:
            outcome = error
        except OSError as error:
            path = Path(config.run_dir or Path.cwd() / "runs")
            outcome = refusal(error, path) or ConfigError(
                f"run_dir={path}: {error.strerror or error}: {error.filename or path}. Choose another run_dir."
            )
    outcome = broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    assert isinstance(outcome, RunFolder)
    return outcome


def _prepare(config: RunConfig) -> RunFolder:
    if config.run_dir is None:
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
            raise ConfigError(
                "the launcher may start this run again after a crash, and without run_dir it would begin anew in "
                "another folder each time. Give run_dir=PATH, or launch without restarts."
            )
        parent = Path.cwd() / "runs"
        made = _missing(parent)
        path = _new_folder(parent, f"{config.name}-{config.precision.name}")
        made = (path, *made)
        config = replace(config, run_dir=str(path))
    else:
        path = Path(config.run_dir)
        made = _missing(path)
        claim(path)
    _lock(path)
    try:
        folder = _continued(path, config) if has_begun(path) else _fresh_or_branch(path, config)
    except BaseException:
        _remove_if_unused(path, made)
        release_locks()
        raise
    return replace(folder, made=made)


def _missing(path: Path) -> tuple[Path, ...]:
    """`path` and the folders above it that do not exist yet, innermost first."""
    return tuple(folder for folder in (path, *path.parents) if not folder.exists())


def _remove_if_unused(path: Path, made: tuple[Path, ...]) -> None:
    """Takes away what a start that came to nothing left: its lock, and folders that it made. Called under the lock."""
    own = {LOCK, *(temporary_of(path / name).name for name in (CONFIG, ENVIRONMENT, PRECISION, BRANCH))}
    if {entry.name for entry in path.iterdir()} <= own:
        for entry in path.iterdir():
            entry.unlink()
        for folder in made:
            if any(folder.iterdir()):
                break
            folder.rmdir()


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


def _lock(path: Path) -> None:
    """Holds the folder as long as this process lives. File systems without locks are left alone."""
    file = open(path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (held open on purpose)
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
    if step >= config.steps:
        raise ConfigError(
            f"resume={config.resume}: the checkpoint is at step {step} and steps={config.steps}: set steps above {step}"
        )
    branch = {"run": str(parent), "checkpoint": str(checkpoint), "step": step}
    return RunFolder(path, config, "branch", checkpoint, tuple(notes), branch)


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
        raise ConfigError(
            f"resume={source}: is neither a run folder nor a checkpoint's ({CONFIG} is missing). Give the run_dir of "
            "the run to start from, or one of the folders in its checkpoints/."
        )
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
        return RunFolder(path, config, "resume", checkpoint, tuple(notes), branch)
    if branch is not None:
        origin = Path(branch["checkpoint"])
        problem = checkpoint_files.damage(origin)
        if problem:
            raise CheckpointError(
                f"run_dir={path}: is a branch without a checkpoint of its own yet, and the one it starts from, "
                f"{origin}, can't be used: {problem}. Restore it, or branch from another one in another run_dir."
            )
        return RunFolder(path, config, "branch", origin, tuple(notes), branch)
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
    return [f"{key} was {_brief(old)}, is {_brief(new)}{_FROM_HERE}" for key, (old, new) in said.items()]


def recipe_of(config: RunConfig) -> dict[str, Any]:
    """What of the precision decides the numbers, as plain values: all but descriptions and where it is computed."""
    apart = {key.removeprefix("precision.") for key in (*UNSAID, "precision.backend")}
    return {key: value for key, value in to_mapping(config)["precision"].items() if key not in apart}


def another_recipe(start: checkpoint_files.Header, config: RunConfig) -> bool:
    """Whether the checkpoint was trained in another recipe than the one of now."""
    if start.recipe is None:
        return start.precision != config.precision.name
    return start.recipe != recipe_of(config)


def _listing(changed: dict[str, tuple[Any, Any]]) -> str:
    return "\n".join(f"  {key}: {_brief(old)} there, {_brief(new)} here" for key, (old, new) in changed.items())


def _brief(value: Any) -> str:
    return shown(value).removesuffix(" (text)").removesuffix(" (a number)").removesuffix(" (a truth value)")


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(checkpoint.name.removeprefix(checkpoint_files.PREFIX))
