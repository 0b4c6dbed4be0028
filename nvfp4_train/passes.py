"""Forward and backward over the micro-batches of a step, through Megatron's schedules, in training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from models.attention import positions_of_rank
from models.megatron_cpu import megatron_device
from nvfp4_train import phase
from nvfp4_train.distributed import World, sum_over_model
from nvfp4_train.outcome import LossSum
from nvfp4_train.precision.runtime import PrecisionRuntime

Batch = dict[str, torch.Tensor]


class RecordedPasses(Protocol):
    """What runs a step's passes without Python, where it can: `nvfp4_train.graphs`."""

    @property
    def serve(self) -> bool:
        """Whether the step that began runs by it."""

    def run(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """All micro-batches of this rank, forward and backward; of each the sum of nats and of tokens, FP64 [2]."""

    def make_room(self) -> None:
        """Before passes without it: free memory if they would find too little."""


def run_micro_batches(
    chunks: Sequence[Any],
    batches: Sequence[Batch],
    runtime: PrecisionRuntime,
    world: World,
    *,
    training: bool,
    graphs: RecordedPasses | None = None,
) -> LossSum:
    """All micro-batches of this rank forward and, in training, backward.

    The loss is the sum over valid tokens divided by the number of valid tokens of the whole global batch, whatever
    their share in each micro-batch. The buffers then hold the gradient of the sum; the update divides it.

    Args:
        chunks: what this rank holds of the model: one, or one for each virtual stage; in training within Megatron's
            data-parallel wrappers.
        batches: `tokens`, `labels` and `loss_mask`, each [micro-batch, sequence], and `documents` where these are kept
            apart.
        graphs: of the one chunk, to train with wherever they serve.

    Returns:
        The loss of the global batch; the device may still be at work.
    """
    if training and graphs is not None:
        if graphs.serve:
            phase.enter(f"forward of step {_number(runtime)}")  # and backward: both are replayed
            return LossSum(torch.stack(graphs.run(batches)), world)
        graphs.make_room()
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
    return LossSum(sums, world)


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
        phase.enter(f"forward of step {_number(runtime)}")
        runtime.begin_microbatch(index * world.data_size + world.data_rank)
    batch = to_device(batch, world)
    losses = losses_of(model, batch)
    if training:  # what Megatron's schedule does until it calls again
        phase.enter(f"backward of step {_number(runtime)}")
    return losses, partial(loss_sum, mask=batch["loss_mask"])


def _number(runtime: PrecisionRuntime) -> int:
    """Of the step under way, counted from 1."""
    assert runtime.step is not None, "micro-batches of training before begin_step"
    return runtime.step + 1


def to_device(batch: Batch, world: World) -> Batch:
    """This context rank's share of a micro-batch, where the model is; documents are whole everywhere."""
    shares = {name: part if name == "documents" else context_share(part) for name, part in batch.items()}
    return {name: share.to(world.device, non_blocking=True) for name, share in shares.items()}


def losses_of(model: Any, batch: Batch) -> torch.Tensor:
    """What the model's part on this rank gives for a micro-batch: the loss of each token on the last stage."""
    documents = batch.get("documents")
    return model(batch["tokens"], None, None, labels=batch["labels"], documents=documents)  # type: ignore[no-any-return]


def loss_sum(losses: torch.Tensor, *, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum of nats over valid tokens, their number, and both as FP64 for the log.

    `losses` and `mask` are [micro-batch, sequence] FP32. Masked losses are dropped, not multiplied by zero: that would
    keep a NaN.
    """
    valid = torch.where(mask > 0, losses, 0.0)
    total, count = valid.sum(), (mask > 0).sum(dtype=torch.int32)
    return total, count, torch.stack([valid.detach().sum(dtype=torch.float64), count.double()])
