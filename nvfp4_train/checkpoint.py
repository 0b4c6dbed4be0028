"""Saving and loading the whole state of a run with Megatron's sharded checkpoints: written whole or not at all.

Loading runs no code: `checkpoint_files.damage` checks sums and index first, and what is not a tensor is read by torch's
weights-only loader.
"""

from __future__ import annotations

import os
import pickle
import queue
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from data.quiet import quiet
from models.megatron_cpu import megatron_device
from nvfp4_train import checkpoint_files as files
from nvfp4_train.checkpoint_files import CheckpointError, Header
from nvfp4_train.distributed import World, gather, no_new_teams, on_main
from nvfp4_train.optimizer import load_moments
from nvfp4_train.random_state import random_states, set_random_states

# Megatron passes the writer's results through a queue that it makes with a spawned process: 3 s at the first save, a
# child that signals reach. A synchronous save stays in one process, where an ordinary queue does.
filesystem_async._results_queue = queue.Queue()


# A distributed optimizer's moments are written as if each replica had all of them, so any layout can load them.
_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds. `chunks` are the rank's share of the model, one or one for each virtual stage; `runtime`
    has `state_dict` and `load_state_dict` of tensors by global linear name.
    """

    chunks: Sequence[Any]
    optimizer: Any
    runtime: Any


@dataclass(frozen=True)
class Saved:
    """A finished save: its folder, bytes on disk and seconds."""

    path: Path
    bytes: int
    seconds: float


def save(root: Path, state: TrainingState, header: Header, keep: int, world: World) -> Saved:
    """Write one checkpoint under `root`, move `latest` to it, then drop the oldest beyond `keep`.

    Raises:
        CheckpointError: not enough room (path, needed and free bytes). What was written is removed; older ones stay.
    """
    start = time.perf_counter()
    final = files.step_folder(root, header.step)
    temporary = final.with_name(final.name + files.TEMPORARY)
    content = _content(state, world, loading=False)
    needed = sum(gather(_bytes_of(content), world))

    def prepare() -> None:
        root.mkdir(parents=True, exist_ok=True)
        files.remove_temporary(root)
        files.check_room(root, needed)
        temporary.mkdir()

    def finish() -> None:
        files.publish(temporary, final, header)
        files.drop_old(root, keep)

    on_main(world, prepare)
    try:
        with megatron_device(), quiet(), no_new_teams():
            dist_checkpointing.save(content, str(temporary))
        on_main(world, finish)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        free = shutil.disk_usage(
            root
        ).free  # before the partial one goes: Megatron does not hand on the system's reason
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        if files.out_of_space(error) or free < needed // 100:
            raise files.no_room(root, needed, free) from None
        raise
    return Saved(final, sum(file.stat().st_size for file in final.iterdir()), time.perf_counter() - start)


@dataclass(frozen=True)
class Loaded:
    """Attributes: header: of the checkpoint; new_histories: tensors without an amax history in it, which start anew."""

    header: Header
    new_histories: list[str]


def load(path: Path, state: TrainingState, world: World) -> Loaded:
    """Put the whole state of the checkpoint at `path` into `state` and the random generators.

    `path` must be whole (`checkpoint_files.damage`). The recipe may be another one: histories are taken where both have
    them. Random states are per rank, and another number of ranks keeps its own.

    Raises:
        CheckpointError: a weight or a moment is missing, is one too many, or has another shape.
    """
    header = files.read_header(path)
    wanted = _content(state, world, loading=True)
    same_world = header.world == world.size
    if same_world:
        wanted["random_states"] = ShardedObject("random_states", None, (world.size,), (world.rank,))
    loaded = _load(path, wanted, strict="raise_all" if same_world else "raise_unexpected")
    _load_chunks(state.chunks, loaded["model"])
    load_moments(state.optimizer, loaded["optimizer"])
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


def _content(state: TrainingState, world: World, loading: bool) -> dict[str, Any]:
    """The sharded state that Megatron saves, or fills when loading."""
    with megatron_device():
        model = _sharded(state.chunks)
        optimizer = state.optimizer.sharded_state_dict(model, is_loading=loading, metadata=_RESHARDABLE)
        content = {"model": model, "optimizer": optimizer}
    if not loading:
        histories: dict[
            str, Any
        ] = {}  # equal on all tensor-parallel ranks; pipeline stages each have their own linears
        for part in gather(state.runtime.state_dict(), world):
            histories.update(part)
        states = ShardedObject("random_states", random_states(), (world.size,), (world.rank,))
        content |= {"precision": histories, "random_states": states}
    return content


def _bytes_of(content: dict[str, Any]) -> int:
    """Bytes of the tensors that this rank writes, and a little for the rest."""
    tensors = [item for item in nested_values(content) if isinstance(item, ShardedTensor | ShardedTensorFactory)]
    mine = [tensor.data for tensor in tensors if is_main_replica(tensor.replica_id)]
    return sum(data.numel() * data.element_size() for data in mine) + 2**20
