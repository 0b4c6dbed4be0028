"""Forward and backward over the micro-batches of a step, through Megatron's schedules, in training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from data.loading import combine, sample_digest
from models.attention import positions_of_rank
from models.megatron_cpu import megatron_device
from nvfp4_train.distributed import World, gather_data_parallel, sum_over_model
from nvfp4_train.precision.runtime import PrecisionRuntime

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LossSum:
    """Attributes: nats: sum over valid tokens of the global batch, in FP64; tokens: how many are valid."""

    nats: float
    tokens: int

    @property
    def mean(self) -> float:
        """Nats a token; 0 where no token is valid."""
        return self.nats / self.tokens if self.tokens else 0.0


def run_micro_batches(
    chunks: Sequence[Any], batches: Sequence[Batch], runtime: PrecisionRuntime, world: World, *, training: bool
) -> LossSum:
    """All micro-batches of this rank forward and, in training, backward.

    The loss is the sum over valid tokens divided by the number of valid tokens of the whole global batch, whatever
    their share in each micro-batch. The buffers then hold the gradient of the sum; the update divides it.

    Args:
        chunks: what this rank holds of the model: one, or one for each virtual stage; in training within Megatron's
            data-parallel wrappers.
        batches: `tokens`, `labels` and `loss_mask`, each [micro-batch, sequence], and `documents` where these are kept
            apart.

    Returns:
        The loss of the global batch, summed in the order of its micro-batches: the same bits in every layout.
    """
    shape = batches[0]["tokens"].shape
    step = partial(_forward, runtime=runtime, world=world, training=training)
    with megatron_device(), torch.set_grad_enabled(training):
        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(enumerate(batches)) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(batches),
            seq_length=shape[1],
            micro_batch_size=shape[0],
            forward_only=not training,
        )
    # Only the last pipeline stage has losses, and each context rank those of its own tokens.
    sums = torch.stack(outputs) if outputs else torch.zeros(len(batches), 2, dtype=torch.float64, device=world.device)
    sum_over_model(sums)
    by_rank = gather_data_parallel(sums.tolist(), world)  # one wait for the device, [micro-batches, (nats, tokens)]
    in_order = [pair for micro_batch in zip(*by_rank, strict=True) for pair in micro_batch]
    return LossSum(sum(nats for nats, _ in in_order), int(sum(tokens for _, tokens in in_order)))


def batch_hash(batches: Sequence[Batch], world: World) -> str:
    """Hash of the tokens of the global batch, the same in every layout: by micro-batch, rank and sample.

    Args:
        batches: this rank's micro-batches of the step.
    """
    mine = [[sample_digest(sample) for sample in batch["tokens"]] for batch in batches]
    by_rank = gather_data_parallel(mine, world)
    return combine(digest for ranks in zip(*by_rank, strict=True) for samples in ranks for digest in samples)


def context_share(sequences: torch.Tensor) -> torch.Tensor:
    """Of [micro-batch, sequence] the two pieces that this context rank works on."""
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return sequences
    rank, length = parallel_state.get_context_parallel_rank(), sequences.shape[1] // ranks
    return sequences[:, positions_of_rank(rank, ranks, length, sequences.device)].contiguous()


def _forward(
    iterator: Iterator[tuple[int, Batch]], model: Any, *, runtime: PrecisionRuntime, world: World, training: bool
) -> tuple[torch.Tensor, Any]:
    """Megatron's forward step: the losses of one micro-batch, and what sums them up."""
    index, batch = next(iterator)
    if training:
        runtime.begin_microbatch(index * world.data_size + world.data_rank)
    tokens, labels, mask = (
        context_share(batch[name]).to(world.device, non_blocking=True) for name in ("tokens", "labels", "loss_mask")
    )
    documents = batch["documents"].to(world.device, non_blocking=True) if "documents" in batch else None
    return model(tokens, None, None, labels=labels, documents=documents), partial(_loss_sum, mask=mask)


def _loss_sum(losses: torch.Tensor, *, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum of nats over valid tokens, their number, and both as FP64 for the log.

    `losses` and `mask` are [micro-batch, sequence] FP32. Masked losses are dropped, not multiplied by zero: that would
    keep a NaN.
    """
    valid = torch.where(mask > 0, losses, 0.0)
    total, count = valid.sum(), (mask > 0).sum(dtype=torch.int32)
    return total, count, torch.stack([valid.detach().sum(dtype=torch.float64), count.double()])
