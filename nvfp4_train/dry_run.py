"""Build one replica of a layout on one machine, without its memory and without its processes.

Every pipeline stage is built on the meta device by Megatron and our own classes, as the ranks of a run would build it,
over process groups that exist in name alone (torch's `fake` backend). Replicas are copies, so one stands for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.hybrid import named_linears
from models.shapes import count_parameters, stage_patterns
from nvfp4_train.chunks import build_chunks
from nvfp4_train.config import RunConfig
from nvfp4_train.gradients import named_parameters
from nvfp4_train.layout import model_ranks
from nvfp4_train.memory import Memory, Place, rank_memory
from nvfp4_train.precision.assignment import LinearPrecision
from nvfp4_train.precision.linear import attach
from nvfp4_train.precision.runtime import PrecisionRuntime


@dataclass(frozen=True)
class Stage:
    """What each rank of one pipeline stage holds.

    Attributes:
        blocks: letters of its blocks; of each virtual stage, one after another.
        parameters: of one rank.
        linears: how many of its linears run in which format.
        memory: what a GPU of it needs.
    """

    blocks: tuple[str, ...]
    parameters: int
    linears: dict[str, int]
    memory: Memory


@contextmanager
def _pretended(config: RunConfig, rank: int) -> Iterator[None]:
    """Process groups of one replica as this rank would see them."""
    parallel = config.parallel
    dist.init_process_group("fake", rank=rank, world_size=model_ranks(parallel), store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            parallel.tensor,
            parallel.pipeline,
            parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            context_parallel_size=parallel.context,
            create_gloo_process_groups=False,  # nothing is pretended of those
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def dry_run(config: RunConfig, assignments: Sequence[LinearPrecision], world_size: int) -> list[Stage]:
    """Every pipeline stage of a run on `world_size` ranks, built without memory; `layout.check_run` comes before.

    Raises AssertionError where the stages together are not the model.
    """
    parallel, data = config.parallel, config.data
    patterns = stage_patterns(config.model, parallel.pipeline, parallel.virtual_pipeline)
    formats = {linear.name: linear.format for linear in assignments}
    tokens = data.micro_batch * data.sequence_length // parallel.context
    stages, whole = [], Counter[str]()
    for number in range(parallel.pipeline):
        with _pretended(config, number * parallel.tensor * parallel.context):
            chunks = build_chunks(config, "meta")
            held = {name: linear for chunk in chunks for name, linear in named_linears(chunk).items()}
            attach(held, assignments, PrecisionRuntime(config.seed))
        parameters = [parameter for _, parameter in named_parameters(chunks)]
        blocks = tuple(layer.layer_number - 1 for chunk in chunks for layer in chunk.decoder.layers)
        local = sum(parameter.numel() for parameter in parameters)
        needed = rank_memory(config.model, assignments, tokens, _place(config, number, blocks, local, world_size))
        counts = dict(Counter(formats[name] for name in held))
        stages.append(Stage(patterns[number :: parallel.pipeline], local, counts, needed))
        whole["parameters"] += sum(_unsharded(parameter, parallel.tensor) for parameter in parameters)
        whole["linears"] += len(held)
    meant = {"parameters": count_parameters(config.model), "linears": len(assignments)}
    assert whole == meant, f"all stages hold {dict(whole)}, the model {meant}"
    return stages


def _place(config: RunConfig, stage: int, blocks: tuple[int, ...], parameters: int, world_size: int) -> Place:
    """Where the ranks of a stage stand, in Megatron's schedules."""
    parallel, data = config.parallel, config.data
    ahead, virtual = parallel.pipeline - 1 - stage, parallel.virtual_pipeline
    micro_batches = data.global_batch * model_ranks(parallel) // (data.micro_batch * world_size)
    if virtual == 1:
        kept = float(min(ahead + 1, micro_batches))
    else:  # counted in virtual stages
        kept = min(2 * ahead + (virtual - 1) * parallel.pipeline + 1, virtual * micro_batches) / virtual
    return Place(
        blocks,
        last=ahead == 0,
        parameters=parameters,
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        sharing=world_size // (parallel.tensor * parallel.pipeline) if parallel.distributed_optimizer else 1,
        kept=kept,
    )


def _unsharded(parameter: Any, tensor: int) -> int:
    """Elements of the whole parameter; none of a tied embedding's copy on the last stage."""
    if getattr(parameter, "shared", False):
        return 0
    return parameter.numel() * (tensor if getattr(parameter, "tensor_model_parallel", False) else 1)
