"""The whole state of a run as Megatron's sharded tensors, and loading it; `writer` saves it.

Loading runs no code: `files.damage` checks sums and index first, and what is not a tensor is read by torch's
weights-only loader.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from data.quiet import quiet
from models.megatron_cpu import megatron_device
from nvfp4_train.checkpoints import files
from nvfp4_train.checkpoints.files import CheckpointError, Header
from nvfp4_train.checkpoints.moments import set_steps_taken, sharded_moments, steps_taken
from nvfp4_train.checkpoints.random_state import random_states, set_random_states
from nvfp4_train.distributed import World, gather, no_new_teams


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds. `chunks` are the rank's share of the model, one or one for each virtual stage; `runtime`
    has `state_dict` and `load_state_dict` of tensors by global linear name.
    """

    chunks: Sequence[Any]
    optimizer: Any
    runtime: Any


@dataclass(frozen=True)
class Loaded:
    """Attributes: header: of the checkpoint; new_histories: tensors without an amax history in it, which start anew."""

    header: Header
    new_histories: list[str]


def load(path: Path, state: TrainingState, world: World) -> Loaded:
    """Put the whole state of the checkpoint at `path` into `state` and the random generators.

    `path` must be whole (`files.damage`). The recipe may be another one: histories are taken where both have
    them. Random states are per rank, and another number of ranks keeps its own.

    Raises:
        CheckpointError: a weight or a moment is missing, is one too many, or has another shape.
    """
    header = files.read_header(path)
    wanted = _tensors(state)
    same_world = header.world == world.size
    if same_world:
        wanted["random_states"] = ShardedObject("random_states", None, (world.size,), (world.rank,))
    strict = "raise_all" if same_world else "raise_unexpected"
    loaded = _on_all_ranks(partial(_load, path, wanted, strict), world)
    _load_chunks(state.chunks, loaded["model"])
    set_steps_taken(state.optimizer, loaded["optimizer"]["state"]["common_step"])
    new_histories = state.runtime.load_state_dict(loaded["precision"])
    if same_world:
        set_random_states(loaded["random_states"])
    return Loaded(header, new_histories)


def load_weights(path: Path, chunks: Sequence[Any], runtime: Any) -> Loaded:
    """Put the weights and the amax histories alone of the whole checkpoint at `path` where they belong; see `load`."""
    with megatron_device():
        wanted = {"model": _sharded(chunks)}
    loaded = _load(path, wanted, strict="raise_unexpected")
    _load_chunks(chunks, loaded["model"])
    return Loaded(files.read_header(path), runtime.load_state_dict(loaded["precision"]))


def _on_all_ranks(action: Callable[[], dict[str, Any]], world: World) -> dict[str, Any]:
    """What `action` returns. Where it fails on one rank, that one raises its own error, and the others say whose."""
    failure: Exception | None = None
    try:
        found = action()
    except Exception as error:
        failure = error
    host, mistake = socket.gethostname(), isinstance(failure, CheckpointError)
    said = gather(failure and (f"{type(failure).__name__}: {failure}", host, mistake), world)
    if failure is not None:
        raise failure
    for rank, failed in enumerate(said):
        if failed is not None:
            text, host, mistake = failed
            raise (CheckpointError if mistake else RuntimeError)(f"rank {rank} on {host} loaded no checkpoint: {text}")
    return found


def _sharded(chunks: Sequence[Any]) -> dict[str, Any]:
    """Megatron's sharded state of each chunk; names in a file are global, whatever chunk or stage a block is in."""
    return {f"chunk{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


def _load_chunks(chunks: Sequence[Any], loaded: dict[str, Any]) -> None:
    with megatron_device():
        for number, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded[f"chunk{number}"])


def _load(path: Path, wanted: dict[str, Any], strict: str) -> dict[str, Any]:
    try:
        with megatron_device(), _weights_only(), quiet(), no_new_teams():
            return dist_checkpointing.load(wanted, str(path), strict=strict)
    except pickle.UnpicklingError as error:
        raise _not_loaded(path, str(error)) from None
    except (CheckpointingException, CheckpointException, KeyError) as error:
        failures = [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
        reason = " ".join(str(failures[0] if failures else error).split())
        if _refused_by_loader(reason):
            raise _not_loaded(path, reason) from None
        raise CheckpointError(f"checkpoint {path} does not fit this model and optimizer: {reason}") from None


def _refused_by_loader(reason: str) -> bool:
    return "weights only load failed" in reason.lower() or "weights_only" in reason


def _not_loaded(path: Path, reason: str) -> CheckpointError:
    """The error for content that the weights-only loader refused. Its own text advises to run the content: not told."""
    found = re.search(r"(?:GLOBAL|global:?|function|class:?|type)\s+([A-Za-z_]\w*(?:\.\w+)+)", reason)
    what = found.group(1) if found else "something besides tensors and plain values"
    return CheckpointError(
        f"checkpoint {path} is not loaded: it refers to {what}, which no checkpoint needs, and loading it could run "
        "foreign code. Use a checkpoint that this version of nvfp4_train wrote, or an older one of the run"
    )


@contextmanager
def _weights_only() -> Iterator[None]:
    """torch.load refuses everything but tensors and plain values, also where a library asks it not to."""
    variable = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    former = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if former is None:
            del os.environ[variable]
        else:
            os.environ[variable] = former


def content(state: TrainingState, world: World) -> dict[str, Any]:
    """All that Megatron is to save of this rank's `state`: the tensors in the state's own memory, the rest copied."""
    histories: dict[str, Any] = {}  # equal on all tensor-parallel ranks; pipeline stages each have their own linears
    for part in gather(state.runtime.state_dict(), world):
        histories.update(part)
    found = _tensors(state)
    found["optimizer"]["state"]["common_step"] = steps_taken(state.optimizer)
    states = ShardedObject("random_states", random_states(), (world.size,), (world.rank,))
    return found | {"precision": histories, "random_states": states}


def _tensors(state: TrainingState) -> dict[str, Any]:
    """The sharded weights and moments."""
    with megatron_device():
        model = _sharded(state.chunks)
        return {"model": model, "optimizer": {"state": sharded_moments(state.optimizer, model)}}
