"""Forward and backward pass of a micro-batch, and the update, as CUDA graphs, so that the GPU never waits for Python.

Python needs about ten microseconds to launch a kernel, and a small model's kernels are shorter. A graph is recorded
once, while nothing runs, and replayed with one launch: the same kernels on the same addresses, so a step has the bits
that it has without. What differs from one replay to the next lies in memory that is filled before it: the batch and the
keys of its random bits; the learning rate and what the gradients are multiplied by.

Two graphs make the passes of a step, of its first micro-batch, which quantizes the weights too, and of every later one,
which uses what the first left. Steps in which Python must watch run without: the first step of the process and of each
phase, in which the precision runtime takes down what ran (and kernels are compiled and tuned), and those whose
quantization health is sampled. So does evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from nvfp4_train.distributed import World
from nvfp4_train.optimizer import inner_optimizers, sharded_parts, update
from nvfp4_train.passes import Batch, loss_sum, losses_of
from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.runtime import PrecisionRuntime


class MicroBatchGraphs:
    """The recorded passes of one model on this rank.

    Args:
        model: within Megatron's data-parallel wrapper, which must not sum gradients during the backward pass.
        runtime: what the model's linears share.
        world: where this process stands.
    """

    def __init__(self, model: Any, runtime: PrecisionRuntime, world: World) -> None:
        self._model, self._runtime, self._world = model, runtime, world
        self._passes: Passes | None = None
        self._pool: Any = None
        self._pool_bytes = 0
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}  # by whether the micro-batch is the first of its step
        self._batch: Batch = {}
        self._keys = runtime.new_keys()
        self._sums = torch.zeros(2, dtype=torch.float64, device=world.device)

    @property
    def serve(self) -> bool:
        """Whether the step that began runs as graphs."""
        return not (self._runtime.observing or self._runtime.sample_health)

    def run(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """All micro-batches of this rank, forward and backward, as Megatron's schedule without a pipeline runs them.

        Returns:
            Of each micro-batch the sum of nats and the number of valid tokens, FP64 [2].
        """
        runtime, world, sums = self._runtime, self._world, []
        if self._passes != runtime.passes:
            self.forget()
            self._passes = runtime.passes
        for number, batch in enumerate(batches):
            self._fill(batch)
            runtime.begin_microbatch(number * world.data_size + world.data_rank, self._keys)
            first = number == 0
            if first not in self._graphs:
                self._graphs[first] = self._record()
            self._graphs[first].replay()
            sums.append(self._sums.clone())
        self._model.config.finalize_model_grads_func([self._model])
        return sums

    def make_room(self) -> None:
        """Before a step without graphs: forget them if the GPU has no room for its activations beside theirs."""
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        unused = max(0, reserved - torch.cuda.memory_allocated() - self._pool_bytes)
        if free + unused < self._pool_bytes:
            self.forget()

    def forget(self) -> None:
        """Drop what is recorded and its memory; the next step records anew."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs, self._pool, self._pool_bytes = {}, None, 0
        self._runtime.weights_changed()

    def _fill(self, batch: Batch) -> None:
        if not self._batch:
            self._batch = {name: torch.empty_like(part, device=self._world.device) for name, part in batch.items()}
        for name, part in batch.items():
            self._batch[name].copy_(part, non_blocking=True)

    def _record(self) -> torch.cuda.CUDAGraph:
        """The passes of the micro-batch that began; nothing of them runs yet."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with _recording(graph, self._pool):
            total, _, sums = loss_sum(losses_of(self._model, self._batch), mask=self._batch["loss_mask"])
            total.backward()
            self._sums.copy_(sums)
        self._pool_bytes += torch.cuda.memory_reserved() - before
        return graph


class UpdateGraph:
    """`optimizer.update` as a CUDA graph; its first call, which may compile and allocate, runs without.

    Args:
        optimizer: torch's AdamW, fused, which no replicas share.
        chunks: whose gradients it applies.
        device: of the parameters.
    """

    def __init__(
        self, optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel], device: torch.device
    ) -> None:
        self._optimizer, self._chunks = optimizer, chunks
        self._factor, self._lr = torch.ones(2, device=device).unbind()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = False

    def __call__(self, factor: float) -> None:
        """One step with the gradients times `factor`, at the learning rate that the groups have."""
        if not self._warm:
            update(self._optimizer, self._chunks, factor)
            self._warm = True
            return
        self._factor.fill_(factor)
        self._lr.fill_(self._groups()[0]["lr"])
        if self._graph is None:
            self._graph = self._record()
        self._graph.replay()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for inner in inner_optimizers(self._optimizer) for group in inner.param_groups]

    def _record(self) -> torch.cuda.CUDAGraph:
        graph, groups = torch.cuda.CUDAGraph(), self._groups()
        before = [(group["lr"], group["capturable"]) for group in groups]
        for group in groups:
            group["lr"], group["capturable"] = self._lr, True
        try:
            with _recording(graph):
                update(self._optimizer, self._chunks, self._factor)
        finally:
            for group, (lr, capturable) in zip(groups, before, strict=True):
                group["lr"], group["capturable"] = lr, capturable
        return graph


def build_update(
    optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel], world: World, *, graphs: bool
) -> Callable[[float], None]:
    """`optimizer.update` for these; as a graph where it is torch's and exchanges nothing with other ranks."""
    ours = all(isinstance(inner, torch.optim.AdamW) for inner in inner_optimizers(optimizer))
    if graphs and ours and not sharded_parts(optimizer):
        return UpdateGraph(optimizer, chunks, world.device)
    return partial(update, optimizer, chunks)


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What is launched within becomes the graph. Other threads go on: they pin batches, and NCCL's looks at its events.

    Activation recompute saves and restores the GPU's random state by reference here, since no number can be read.
    Nothing draws from it: there is no dropout, and stochastic rounding has keys of its own.
    """
    tracker = get_cuda_rng_tracker()
    tracker.use_cudagraphable_rng = True
    try:
        with torch.cuda.graph(graph, pool, torch.cuda.current_stream(), capture_error_mode="thread_local"):
            yield
    finally:
        tracker.use_cudagraphable_rng = False
