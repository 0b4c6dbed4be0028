"""Process groups: torchrun's world, or a world of one without it; and the few collectives the trainer speaks in."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nvfp4_train.config import ConfigError, ParallelConfig
from nvfp4_train.devices import check_cuda
from nvfp4_train.signals import StopSignals
from nvfp4_train.started_with import flatten, other_values
from nvfp4_train.watch import COME, Watch

with warnings.catch_warnings():  # one line for each optional library that is not installed, from several modules
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel

from models.megatron_cpu import install_cpu_rng


def _unheard(error: BaseException) -> None:
    """There is nobody to tell."""


@dataclass(frozen=True)
class World:
    """Where this process stands.

    Attributes:
        rank, size: of the whole world.
        device: what this rank computes on.
        data_rank, data_size: its place among the ranks that read different batches.
        report: tells the other ranks of the error that this one ends with, before it has cleaned up.
    """

    rank: int
    size: int
    device: torch.device
    data_rank: int
    data_size: int
    report: Callable[[BaseException], None] = _unheard

    @property
    def is_main(self) -> bool:
        """True for the one rank that prints, logs and writes the run folder."""
        return self.rank == 0


@contextmanager
def process_groups(
    parallel: ParallelConfig,
    seed: int,
    settings: Mapping[str, Any] | None = None,
    signals: StopSignals | None = None,
) -> Iterator[World]:
    """Start the process groups and Megatron's parallel state, and end them with the block.

    Under torchrun (`RANK` and `WORLD_SIZE` set) joins its world, whose ranks then watch each other; otherwise this
    process is a world of one and needs no network. Groups that already stand are used and left standing. A GPU works on
    a stream of its own within the block: the default one cannot be recorded in CUDA graphs, and gradients arrive where
    a parameter's accumulator was made.

    Args:
        settings: what must be the same on all ranks, as nested JSON values; compared before anything else.
        signals: told when an error ends the block: the launcher's signal must not hide why this rank leaves.

    Raises ConfigError on a rank with other settings; PeerEnded where another rank failed, is gone or hangs.
    """
    logging.getLogger("megatron").setLevel(
        logging.ERROR
    )  # it warns of libraries that we do without, and of our choices
    warnings.filterwarnings("ignore", module=r"megatron\.")
    check_cuda()
    device = _device()
    with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext():
        yield from _joined(parallel, seed, device, settings or {}, signals)


def _joined(
    parallel: ParallelConfig,
    seed: int,
    device: torch.device,
    settings: Mapping[str, Any],
    signals: StopSignals | None,
) -> Iterator[World]:
    """The body of `process_groups`, on the device that was chosen."""
    ours, watch = not dist.is_initialized(), None
    store: dist.Store = dist.HashStore()
    try:
        if ours:
            rank, size = _launched()
            if size > 1:
                watch, store = _connect(Watch(rank, size, parallel.timeout, {**settings, "device": _kind(device)}))
                watch.start()
            backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
        _split(parallel, seed, device)
        yield World(
            dist.get_rank(),
            dist.get_world_size(),
            device,
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
            report=_unheard if watch is None else watch.report,
        )
        if watch is not None:
            watch.ending()
            dist.barrier()  # a launcher ends those that are still busy when the first has left
            watch.finish()
    except BaseException as error:
        if signals is not None:
            signals.leaving = True
        if watch is None:
            raise
        explained = watch.explain(error)
        if explained is error:
            raise
        raise explained from None
    finally:
        if ours and dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _device() -> torch.device:
    """What this rank computes on."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    # By default parts of a product may be added in BF16; ours are FP32 until the one rounding.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return device


def _launched() -> tuple[int, int]:
    """Rank and size of the world that a launcher started, or of this process alone."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if launched else (0, 1)


def _connect(watch: Watch) -> tuple[Watch, dist.Store]:
    """Connects rank 0 with all others; returns the watch and the store where the processes of this start meet."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ConfigError(
            f"WORLD_SIZE={watch.size} is set and MASTER_ADDR or MASTER_PORT is not: start the processes with "
            "python -m launch.run or torchrun, which set all of them, or unset WORLD_SIZE and RANK for one process."
        )
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        host,
        int(port),
        is_master=watch.rank == 0 and not served,
        timeout=timedelta(seconds=COME),
        wait_for_workers=False,
        multi_tenant=True,
    )
    # torchrun's store is the same after a restart, with all that is in it: names begin with this start's own secret.
    if watch.rank == 0:
        address = watch.listen()
        store.set("watch", address)
    else:
        address = watch.connect(host, lambda: store.get("watch").decode())
    return watch, dist.PrefixStore(address, store)


def _kind(device: torch.device) -> str:
    """`cpu`, or what a CUDA device can compute."""
    return device.type if device.type == "cpu" else f"cuda {torch.cuda.get_device_capability(device)}"


def _split(parallel: ParallelConfig, seed: int, device: torch.device) -> None:
    """Megatron's parallel state, and the random generators."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
        )
    if device.type == "cpu":
        install_cpu_rng()
    random.seed(seed)
    np.random.seed(seed % 2**32)  # all that numpy's takes
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def any_rank(flag: bool, world: World) -> bool:
    """True on every rank when `flag` is true on one."""
    if world.size == 1:
        return flag
    agreed = torch.tensor(int(flag), device=world.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return bool(agreed.item())


def stage_group() -> dist.ProcessGroup:
    """All ranks that hold the same linears: those of a pipeline stage."""
    group: dist.ProcessGroup = parallel_state.get_amax_reduction_group(with_context_parallel=True)
    return group


def largest_over_stage(values: torch.Tensor) -> None:
    """In place, the maximum over all ranks of the pipeline stage."""
    group = stage_group()
    if group.size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)


def sum_over_model(values: torch.Tensor) -> None:
    """In place, the sum over context ranks and pipeline stages of one model; tensor-parallel ranks hold the same."""
    for group in (parallel_state.get_context_parallel_group(), parallel_state.get_pipeline_model_parallel_group()):
        if group.size() > 1:
            dist.all_reduce(values, group=group)


def gather(item: Any, world: World) -> list[Any]:
    """`item` of every rank, in the order of ranks, on every rank."""
    return [item] if world.size == 1 else gather_over(dist.group.WORLD, item)


def gather_on_main(item: Any, world: World) -> list[Any]:
    """`item` of every rank, in the order of ranks, on the main rank alone; elsewhere an empty list."""
    if world.size == 1:
        return [item]
    items: list[Any] = [None] * world.size if world.is_main else []
    dist.gather_object(item, items if world.is_main else None, dst=0)
    return items


def gather_data_parallel(item: Any, world: World) -> list[Any]:
    """`item` of every data-parallel rank, in their order."""
    return [item] if world.data_size == 1 else gather_over(parallel_state.get_data_parallel_group(), item)


def each_replicas(values: torch.Tensor, world: World) -> torch.Tensor:
    """`values` of every data-parallel rank in their order, [ranks, *shape], on the device."""
    if world.data_size == 1:
        return values[None]
    found = values.new_empty(world.data_size, *values.shape)
    dist.all_gather_into_tensor(found, values[None], group=parallel_state.get_data_parallel_group())
    return found


def gather_over(group: dist.ProcessGroup | None, item: Any) -> list[Any]:
    """`item` of every rank of a group, in its order, on each of them."""
    items: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group=group)
    return items


def check_same(settings: Mapping[str, Any], world: World) -> None:
    """Refuse to go on where a rank has something else than rank 0: one silent difference spoils a whole run.

    Args:
        settings: flat or nested JSON values of what must be equal everywhere and is known only now; what a rank was
            started with is compared before, in `process_groups`.

    Raises:
        ConfigError: names the rank and the keys.
    """
    mine = {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for key, value in flatten(settings)
    }
    whole = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    if len(set(gather(whole, world))) == 1:
        return
    everyone = gather(mine, world)  # long: only to find out what differs
    for rank, other in enumerate(everyone):
        keys = sorted(key for key in {**everyone[0], **other} if everyone[0].get(key) != other.get(key))
        if keys:
            raise ConfigError(f"rank {rank} {other_values(keys)}")


def on_main(world: World, action: Callable[[], None]) -> None:
    """Run `action` on the main rank; where it fails there, every rank raises."""
    failure: Exception | None = None
    if world.is_main:
        try:
            action()
        except Exception as error:
            failure = error
    failure = gather(failure, world)[0]
    if failure is not None:
        raise failure


@contextmanager
def no_new_teams() -> Iterator[None]:
    """What is done within leaves the threads of a CPU run as they are.

    Collectives of a checkpoint are large enough for Gloo's own threads to compute with an OpenMP team each, and those
    teams stay. GNU OpenMP stops spinning for good once a process has more threads in teams than processors: every
    later step of a small model took one and a half times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
