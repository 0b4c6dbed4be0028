"""Checkpoints written while training goes on, whole or not at all.

A save has three parts. `CheckpointWriter.request`, between two steps, plans with all ranks who writes what, and copies
what this rank writes into the host's memory: from then on training may change it. A thread writes the copy, flushes it
to the disk and takes its sum; it speaks with no other rank. `poll`, before each step, finds out whether all ranks'
threads are done: then the main rank writes the index and the sums, renames the folder, and moves `latest`.

It is a thread and no process, as Megatron's asynchronous strategies have it: a fork of a process with CUDA, Gloo and
OpenMP threads may inherit a lock that nobody opens again, and holds the run folder's lock when its parent is killed.
Python threads do not hinder each other here: writing and summing leave the interpreter to training.
"""

from __future__ import annotations

import hashlib
import queue
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from data.quiet import quiet
from models.megatron_cpu import megatron_device
from nvfp4_train import phase
from nvfp4_train.checkpoints import files
from nvfp4_train.checkpoints.files import Header
from nvfp4_train.checkpoints.state import TrainingState, content
from nvfp4_train.config import CheckpointConfig
from nvfp4_train.distributed import World, any_rank, gather, gather_on_main, no_new_teams, on_main
from nvfp4_train.storage import named

Say = Callable[[str], None]
Bucket = tuple[str, str, tuple[list[Any], list[Any]]]  # path, name, (items of plain values, items of tensors)
_LEAVING = 10.0  # seconds that an abandoned write has to notice


class _Plan(TorchDistSaveShardedStrategy):
    """Megatron's strategy as far as the plan: `writer` knows what this rank writes, `index` what all write."""

    writer: FileSystemWriterAsync
    index: Any

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, strategy: Any) -> AsyncRequest:
        self.writer, self.index = writer, planned[1]
        return AsyncRequest(None, (), [])


@dataclass(frozen=True)
class Part:
    """What became of one rank's part of a checkpoint.

    Attributes:
        host: of the rank.
        seconds: from the copy to the flushed and summed files.
        failure: what went wrong, None where all went well; an OSError is complete, of others the text.
    """

    host: str
    seconds: float
    failure: OSError | str | None


class _Write(threading.Thread):
    """This rank's part of one checkpoint, from the copy in memory to the disk. Leaves no exception behind.

    Attributes:
        sums: SHA-256 of each file.
        results: where each tensor lies, for the index.
        failure: what went wrong so far.
    """

    def __init__(self, writer: FileSystemWriterAsync) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._writer = writer
        self.sums: dict[str, str] = {}
        self.results: list[Any] = []
        self._buckets: list[Bucket] = []
        self._abandoned = threading.Event()
        self._begin = self._end = time.perf_counter()
        self.failure: BaseException | None = None

    def copy_and_start(self) -> None:
        """Return when training may change what is saved. A failure to copy is this rank's failure to write."""
        try:
            self._buckets = [_copied(bucket) for bucket in self._writer.write_buckets or []]
            self._writer.write_buckets = None
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._begin = time.perf_counter()
            self.failure = RuntimeError("the writing thread ended without a word")
            self.start()
        except Exception as error:
            self.failure = error

    def run(self) -> None:
        """Write, flush and sum every file."""
        former = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # takes 20 times as long as writing, and nobody reads it
        try:
            for bucket in self._buckets:  # kept: letting go of pinned memory calls on a GPU that may record a graph
                self._write(bucket)
            self.failure = None
        except BaseException as error:
            self.failure = error
        finally:
            torch.serialization.set_crc32_options(former)
            self._end = time.perf_counter()

    def _write(self, bucket: Bucket) -> None:
        path, name, (plain, tensors) = bucket
        until = path, name, (plain, self._unless_abandoned(tensors))
        with named(Path(path)):
            _, results = FileSystemWriterAsync.write_preloaded_data(
                [self._writer.transforms], 0, until, results_queue=None, count_queue=None, use_fsync=True
            )
            if isinstance(results, BaseException):
                raise results
            with open(path, "rb") as file:
                self.sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
        self.results += results

    def _unless_abandoned(self, tensors: list[Any]) -> Iterator[Any]:
        for item in tensors:
            if self._abandoned.is_set():
                raise InterruptedError("the write was abandoned")
            yield item

    def abandon(self) -> None:
        """Ask the thread to leave, and wait a moment: an interpreter that ends under its feet would crash."""
        self._abandoned.set()
        if self.is_alive():
            self.join(_LEAVING)

    def part(self) -> Part:
        """What came of it, once the thread has ended."""
        error, failure = self.failure, None
        if error is not None:
            failure = _refusal(error) or f"{type(error).__name__}: {error}"
        return Part(socket.gethostname(), self._end - self._begin, failure)


def _copied(bucket: Bucket) -> Bucket:
    """The same with tensors in memory of its own: pinned where they come from a GPU, so that the copy is fast."""
    path, name, (plain, tensors) = bucket
    return path, name, (plain, [(item, _to_host(tensor)) for item, tensor in tensors])


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor.clone()


def _refusal(error: BaseException | None) -> OSError | None:
    """The system's refusal that `error` is or came from."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


@dataclass
class _Flight:
    """A save under way.

    Attributes:
        header, temporary, needed: of the checkpoint; the folder it is written in; the most bytes it may take.
        write: this rank's thread.
        waited: seconds that training waited for it so far.
    """

    header: Header
    temporary: Path
    needed: int
    write: _Write
    waited: float = 0.0


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, and drops old ones.

    Args:
        root: the run's folder of checkpoints.
        config: which are kept.
        say: prints a line on the main rank.
        resumed: the checkpoint that this process started from, which it never drops.
    """

    def __init__(
        self, root: Path, config: CheckpointConfig, world: World, say: Say, resumed: Path | None = None
    ) -> None:
        self._root, self._config, self._world, self._say, self._resumed = root, config, world, say, resumed
        self._flight: _Flight | None = None
        self._plan = _Plan()
        self._strategy: _Plan | FullyParallelSaveStrategyWrapper | None = None

    def request(self, state: TrainingState, header: Header, since: float | None = None) -> None:
        """Begin to save `state` as it is now. Waits for the save before, if that is still under way. On all ranks.

        Args:
            state: of the same parts each time.
            since: when training began to wait for this save, as `time.perf_counter` has it; by default now.

        Raises:
            CheckpointError: no room. What was begun is removed; older ones stay.
        """
        before = 0.0 if since is None else time.perf_counter() - since
        self.finish()
        phase.enter(f"save after step {header.step}")
        start = time.perf_counter() - before
        tensors = content(state, self._world)
        needed = sum(gather(_bytes_of(tensors), self._world))
        token = gather(secrets.token_hex(2), self._world)[0]  # what a lost rank of a former start writes goes elsewhere
        temporary = files.temporary_folder(self._root, header.step, token)
        on_main(self._world, partial(_prepare, self._root, temporary, needed))
        with self._removed_on_failure(temporary, needed):
            self._agree(tensors, temporary)
        write = _Write(self._plan.writer)
        write.copy_and_start()
        self._flight = _Flight(header, temporary, needed, write, time.perf_counter() - start)
        self._say(f"checkpoint {_name(header)}: requested; training waited {self._flight.waited:.2f} s and goes on")

    def poll(self) -> None:
        """Publish the save under way if all ranks have written their part. On all ranks.

        Raises:
            CheckpointError: the disk is full. OSError, RuntimeError: what else a rank met, the same error on all ranks.
        """
        if self._flight is None:
            return
        start = time.perf_counter()
        if any_rank(self._flight.write.is_alive(), self._world):
            self._flight.waited += time.perf_counter() - start
        else:
            self._publish(self._flight, start)

    def finish(self) -> None:
        """Wait until nothing is under way any more. On all ranks; raises as `poll` does."""
        if self._flight is not None:
            start = time.perf_counter()
            if self._flight.write.is_alive():
                self._flight.write.join()
            self._publish(self._flight, start)

    def abandon(self) -> None:
        """Let go of the save under way, where an error ends the run. Its folder goes with the next save."""
        if self._flight is not None:
            self._flight.write.abandon()
            self._flight = None

    def _agree(self, tensors: dict[str, Any], folder: Path) -> None:
        """Agree on who writes what: of what several replicas hold, each writes a share, the same each time."""
        # Megatron hands results of its writers through a queue that it makes with a spawned process: 3 s, and a child
        # that signals reach. Nobody uses it here.
        filesystem_async._results_queue = queue.Queue()
        first = self._strategy is None
        if self._strategy is None:
            replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
            shared = replicas.size() > 1
            self._strategy = FullyParallelSaveStrategyWrapper(self._plan, replicas, True) if shared else self._plan
        with megatron_device(), quiet(), no_new_teams():
            dist_checkpointing.save(tensors, str(folder), self._strategy, first, True, async_strategy="mcore")

    def _publish(self, flight: _Flight, start: float) -> None:
        phase.enter(f"save after step {flight.header.step}")
        parts = gather(flight.write.part(), self._world)
        self._flight = None
        with self._removed_on_failure(flight.temporary, flight.needed):
            _raise_failure(parts, flight)
            written = gather_on_main((flight.write.sums, flight.write.results), self._world)
            on_main(self._world, partial(self._finish_files, flight, written))
        flight.waited += time.perf_counter() - start
        seconds = max(part.seconds for part in parts)
        if self._world.is_main:
            size = files.size(files.step_folder(self._root, flight.header.step))
            self._say(
                f"checkpoint {_name(flight.header)}: durable, {size / 1e6:.1f} MB written in {seconds:.2f} s; "
                f"training waited {flight.waited:.2f} s in all"
            )

    def _finish_files(self, flight: _Flight, written: list[tuple[dict[str, str], list[Any]]]) -> None:
        """On the main rank, when all parts are on the disk; `written`: each rank's sums and places of tensors."""
        sums = {name: found for own, _ in written for name, found in own.items()}
        self._plan.writer.finish(self._plan.index, [results for _, results in written])
        save_config(CheckpointingConfig(self._plan.backend, self._plan.version), str(flight.temporary))
        files.publish(flight.temporary, files.step_folder(self._root, flight.header.step), flight.header, sums)
        spared = () if self._resumed is None else (self._resumed,)
        files.drop_old(self._root, self._config.keep, self._config.keep_every, spared)

    @contextmanager
    def _removed_on_failure(self, temporary: Path, needed: int) -> Iterator[None]:
        """Remove what was written where the block fails, and say so where the disk is full."""
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            free = shutil.disk_usage(self._root).free  # before the partial one goes
            if self._world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            if files.out_of_space(error):
                raise files.no_room(self._root, needed, free) from error
            raise


def _prepare(root: Path, temporary: Path, needed: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    files.remove_temporary(root)
    files.check_room(root, needed)
    temporary.mkdir()


def _raise_failure(parts: list[Part], flight: _Flight) -> None:
    """Raise on every rank what the first rank that failed met; on that rank with all that led to it."""
    for rank, part in enumerate(parts):
        if part.failure is None:
            continue
        where = f"rank {rank} on {part.host}"
        if isinstance(part.failure, OSError):
            refused = part.failure
            raise OSError(refused.errno, f"{refused.strerror} ({where})", refused.filename) from flight.write.failure
        raise RuntimeError(
            f"checkpoint {_name(flight.header)} was not written, {where} failed: {part.failure}. "
            "The checkpoints before it are whole"
        ) from flight.write.failure


def _name(header: Header) -> str:
    return files.step_folder(Path(), header.step).name


def _bytes_of(tensors: dict[str, Any]) -> int:
    """Bytes of the tensors that this rank is the first to hold, and more than enough for the rest."""
    found = [item for item in nested_values(tensors) if isinstance(item, ShardedTensor | ShardedTensorFactory)]
    mine = [item.data for item in found if is_main_replica(item.replica_id)]
    return sum(data.numel() * data.element_size() for data in mine) + 2**20
