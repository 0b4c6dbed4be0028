"""The global batches of a run: read, hashed and (for a GPU) pinned by a thread while the step before trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat

import torch

from data.ahead import ahead
from data.loading import Datasets, combine, sample_digest, train_batches
from nvfp4_train.config import RunConfig
from nvfp4_train.distributed import World, gather_data_parallel
from nvfp4_train.passes import Batch


@dataclass(frozen=True)
class StepBatch:
    """What one rank trains on in one step.

    Attributes:
        micro_batches: in their order; see `run_micro_batches`.
        digests: of the samples of each.
    """

    micro_batches: list[Batch]
    digests: list[list[bytes]]

    def hash(self, world: World) -> str:
        """Of the tokens of the global batch, the same in every layout: by micro-batch, rank and sample."""
        by_rank = gather_data_parallel(self.digests, world)
        return combine(digest for ranks in zip(*by_rank, strict=True) for samples in ranks for digest in samples)


def step_batches(datasets: Datasets, config: RunConfig, world: World, samples: int) -> Iterator[StepBatch]:
    """This rank's part of each step after `samples` samples of the run; with `debug.overfit` the first step's, again
    and again.
    """
    data, overfit = config.data, config.debug.overfit
    micro_batches = train_batches(
        datasets,
        data,
        consumed_samples=0 if overfit else samples,
        data_rank=world.data_rank,
        data_size=world.data_size,
    )
    steps = _by_step(micro_batches, data.global_batch // (data.micro_batch * world.data_size), world.device)
    return repeat(next(steps)) if overfit else ahead(steps, 1)


def _by_step(micro_batches: Iterator[Batch], count: int, device: torch.device) -> Iterator[StepBatch]:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread that was told none would pin memory by way of the first one
    while step := list(islice(micro_batches, count)):
        yield StepBatch(step, [[sample_digest(sample) for sample in batch["tokens"]] for batch in step])
