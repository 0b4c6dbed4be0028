"""Where the first number that is not finite came from: after a step that is skipped for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core import parallel_state

from models.megatron_cpu import megatron_device
from nvfp4_train.distributed import World, gather
from nvfp4_train.gradients import first_bad_gradient, first_bad_output, first_bad_weight, start_gradients
from nvfp4_train.passes import Batch, run_micro_batches
from nvfp4_train.precision.runtime import PrecisionRuntime


def first_bad(
    chunks: Sequence[Any], batches: Sequence[Batch], runtime: PrecisionRuntime, world: World, step: int, loss: float
) -> str:
    """`on rank 1: gradient of NAME`: a weight, an output of the forward pass or a gradient, whichever turned bad first.

    All ranks look for the same thing at a time, because the passes need all of them. Gradients of replicas are summed,
    which spreads one bad number over all of them, so the passes run once more without the sum. What does not come again
    then, because a machine made it and not the numbers, has no rank.

    Args:
        chunks: within Megatron's data-parallel wrappers; their gradients are those that were found bad.
        batches: this rank's micro-batches of the step.
        step: done before it.
        loss: of the step.
    """

    def forward() -> None:
        with runtime.evaluating():
            run_micro_batches(chunks, batches, runtime, world, training=False)

    models = [chunk.module for chunk in chunks]
    searches: dict[str, Callable[[], str | None]] = {"weight": lambda: first_bad_weight(models)}
    if not math.isfinite(loss):
        searches["output of"] = lambda: first_bad_output(models, forward)
    for what, search in searches.items():
        for rank, name in enumerate(gather(search(), world)):
            if name is not None:
                return f"on rank {rank}: {what} {name}"
    summed = gather(first_bad_gradient(models), world)
    if parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1:
        _own_gradients(chunks, batches, runtime, world, step)
        for rank, name in enumerate(gather(first_bad_gradient(models), world)):
            if name is not None:
                return f"on rank {rank}: gradient of {name}"
        name = next((name for name in summed if name is not None), "not found")
        return f"in the sum over replicas, and not again in the same passes: gradient of {name}"
    return next((f"on rank {r}: gradient of {name}" for r, name in enumerate(summed) if name is not None), "not found")


def _own_gradients(
    chunks: Sequence[Any], batches: Sequence[Batch], runtime: PrecisionRuntime, world: World, step: int
) -> None:
    """Both passes of the step once more, from the same random bits; the buffers then hold this rank's own gradients."""
    sampling, runtime.sample_health = runtime.sample_health, False
    runtime.begin_step(step, runtime.passes)
    with megatron_device(), _unsummed(chunks):
        start_gradients(chunks)
        run_micro_batches(chunks, batches, runtime, world, training=True)
    runtime.end_step(skipped=True)
    runtime.sample_health = sampling


@contextmanager
def _unsummed(chunks: Sequence[Any]) -> Iterator[None]:
    """Backward passes leave each replica its own gradients."""
    configs = [chunk.config for chunk in chunks]
    kept = [(config.finalize_model_grads_func, config.no_sync_func) for config in configs]
    with ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(chunk.no_sync())
            chunk.config.finalize_model_grads_func = chunk.config.no_sync_func = None
        try:
            yield
        finally:
            for config, (finalize, no_sync) in zip(configs, kept, strict=True):
                config.finalize_model_grads_func, config.no_sync_func = finalize, no_sync
