"""What may go wrong while several ranks save: what each rank then knows, for `test_checkpoint_cases`."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from nvfp4_train.checkpoints import files as checkpoint_files
from nvfp4_train.checkpoints import state as checkpoint
from nvfp4_train.checkpoints import writer as checkpoint_writer
from nvfp4_train.checkpoints.files import Header, newest_whole
from nvfp4_train.checkpoints.state import TrainingState
from nvfp4_train.checkpoints.writer import CheckpointWriter, FileSystemWriterAsync
from nvfp4_train.config import CheckpointConfig
from nvfp4_train.distributed import World

HEADER = Header(1, 4, 256, 0, "fp8_delayed", {"device": "cpu"}, 2)
REAL_WRITE = FileSystemWriterAsync.write_preloaded_data


def run_cases(root: Path, state: TrainingState, world: World) -> dict[str, Any]:
    """Name of a case -> what this rank saw. All failures find, and must leave, the checkpoint of step 1."""
    said: list[str] = []
    writer = CheckpointWriter(root, CheckpointConfig(1, keep=0), world, said.append)
    save(writer, state, 1)
    found: dict[str, Any] = {}
    for name, broken in failures(world.rank, root.parent / "elsewhere").items():
        with broken:
            found[name] = failure(writer, state, root)
    said.clear()
    found["goes on"] = goes_on(writer, state, root, world) | {"said": list(said)}
    found["abandoned"] = abandoned(writer, state, root, world)
    found["foreign code"] = foreign_code(writer, state, root, world)
    return found


def save(writer: CheckpointWriter, state: TrainingState, step: int) -> None:
    """Request and wait."""
    writer.request(state, replace(HEADER, step=step))
    writer.finish()


def writing(behaviour: Callable[..., Any]) -> Any:
    """Another way to write a file."""
    return mock.patch.object(FileSystemWriterAsync, "write_preloaded_data", behaviour)


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that fails."""

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    return fails


def failures(rank: int, elsewhere: Path) -> dict[str, Any]:
    """Contexts in which one rank can't do its part."""
    full, broken = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")
    little = mock.patch.object(checkpoint_files.shutil, "disk_usage", return_value=SimpleNamespace(free=12345))
    on_1 = {
        "full while writing": writing(lambda *_, **__: (0, full)),
        "broken disk": writing(lambda *_, **__: (0, broken)),
        "thread dies": writing(raising(SystemExit())),
        "no memory to copy": mock.patch.object(checkpoint_writer, "_to_host", raising(MemoryError("copy"))),
        "another folder": mock.patch.object(checkpoint_files, "temporary_folder", return_value=elsewhere),
    }
    on_0 = {
        "no room": little,
        "full at the end": mock.patch.object(checkpoint_files, "flush", raising(full)),
    }
    mine, others = (on_1, on_0) if rank == 1 else (on_0, on_1)
    return dict(sorted((mine | {name: nullcontext() for name in others}).items()))


def failure(writer: CheckpointWriter, state: TrainingState, root: Path) -> dict[str, Any]:
    """Of a save that fails."""
    try:
        save(writer, state, 2)
    except BaseException as error:
        return {"type": type(error).__name__, "text": str(error), **left(root)}
    return {"type": None, "text": "", **left(root)}


def left(root: Path) -> dict[str, Any]:
    """What a folder of checkpoints holds."""
    torch.distributed.barrier()  # the main rank removes what another one may look at
    newest = newest_whole(root)[0]
    seen = {"names": sorted(entry.name for entry in root.iterdir()), "newest": newest and newest.name}
    torch.distributed.barrier()
    return seen


@contextmanager
def held_on_rank_1(rank: int) -> Iterator[threading.Event]:
    """Rank 1 does not begin to write before the event."""
    event = threading.Event()

    def waits(*args: Any, **options: Any) -> Any:
        event.wait()
        return REAL_WRITE(*args, **options)

    with writing(waits) if rank == 1 else nullcontext():
        yield event


def goes_on(writer: CheckpointWriter, state: TrainingState, root: Path, world: World) -> dict[str, Any]:
    """Training changes weights and moments while rank 1 writes; what was saved is what they were."""
    weights = [parameter for chunk in state.chunks for parameter in chunk.parameters()]
    before = [weight.detach().clone() for weight in weights]
    with held_on_rank_1(world.rank) as event:
        writer.request(state, replace(HEADER, step=2))
        with torch.no_grad():
            for weight in weights:
                weight.zero_()
        writer.poll()
        during = left(root)
        event.set()
        writer.finish()
    header = checkpoint.load(root / "step-00000002", state, world).header
    same = all(map(torch.equal, before, weights))
    return {"during": during, "after": left(root), "same": same, "step": header.step}


def abandoned(writer: CheckpointWriter, state: TrainingState, root: Path, world: World) -> dict[str, Any]:
    """A save that an error cuts off is no checkpoint, and goes with the next save."""
    with held_on_rank_1(world.rank) as event:
        writer.request(state, replace(HEADER, step=3))
        writer._flight.write._abandoned.set()  # type: ignore[union-attr]
        event.set()
        writer.abandon()
    during = left(root)
    save(writer, state, 4)
    return {"during": during, "after": left(root)}


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def foreign_code(writer: CheckpointWriter, state: TrainingState, root: Path, world: World) -> dict[str, Any]:
    """In what rank 1 alone reads: every rank refuses the checkpoint."""
    marker = root / "ran"
    states = {"x": Evil(marker)} if world.rank == 1 else checkpoint.random_states()
    with mock.patch.object(checkpoint, "random_states", return_value=states):
        save(writer, state, 5)
    found = {"type": None, "text": ""}
    try:
        checkpoint.load(root / "step-00000005", state, world)
    except ValueError as error:
        found = {"type": type(error).__name__, "text": str(error)}
    return found | {"ran": marker.exists()}
