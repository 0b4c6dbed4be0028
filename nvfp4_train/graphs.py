"""Forward and backward pass of a micro-batch as a CUDA graph, so that the GPU never waits for Python.

Python needs about ten microseconds to launch a kernel, and a small model's kernels are shorter. A graph is recorded
once, while nothing runs, and replayed with one launch: the same kernels on the same addresses, so a step has the bits
that it has without. What differs from one micro-batch to the next lies in memory that is filled before each replay: the
batch, and the keys of the random bits.

Two graphs make a step, of its first micro-batch, which quantizes the weights too, and of every later one, which uses
what the first left. Steps in which Python must watch run without: the first step of the process and of each phase, in
which the precision runtime takes down what ran (and kernels are compiled and tuned), and those whose quantization
health is sampled. So does evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nvfp4_train.config import ConfigError
from nvfp4_train.distributed import World
from nvfp4_train.passes import Batch, loss_sum, losses_of
from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.runtime import PrecisionRuntime


class MicroBatchGraphs:
    """The recorded passes of one model on this rank.

    Args:
        model: within Megatron's data-parallel wrapper, which must not sum gradients during the backward pass.
        runtime: what the model's linears share.
        world: where this process stands.

    Raises:
        ConfigError: while recording, if something in the passes can't be recorded.
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
                self._graphs[first] = self._recorded()
            self._graphs[first].replay()
            sums.append(self._sums.clone())
        self._model.config.finalize_model_grads_func([self._model])
        return sums

    def make_room(self) -> None:
        """Before passes without graphs: forget them if the GPU has no room for a step's activations beside theirs.

        So nothing needs more memory with graphs than without: an evaluation takes less than a step.
        """
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

    def _recorded(self) -> torch.cuda.CUDAGraph:
        try:
            return self._record()
        except RuntimeError as error:
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"The passes of a micro-batch can't be recorded as CUDA graphs here: {cause}. "
                "Write parallel.cuda_graphs=never, which gives the same numbers, slower where a model is small."
            ) from error

    def _record(self) -> torch.cuda.CUDAGraph:
        """The passes of the micro-batch that began; nothing of them runs yet."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        # Other threads go on: they pin batches, and NCCL's asks for the state of its collectives.
        here = torch.cuda.current_stream()
        with torch.cuda.graph(graph, self._pool, here, capture_error_mode="thread_local"):
            total, _, sums = loss_sum(losses_of(self._model, self._batch), mask=self._batch["loss_mask"])
            total.backward()
            self._sums.copy_(sums)
        self._pool_bytes += torch.cuda.memory_reserved() - before
        return graph
