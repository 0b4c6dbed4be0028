"""Validation: nats a token and bits a byte, without a trace in the training that goes on afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from data.config import DataConfig
from data.corpus import bits_per_byte
from data.loading import Datasets, OpenSource, validation_batches
from nvfp4_train.checkpoints.random_state import random_states_kept
from nvfp4_train.distributed import World
from nvfp4_train.passes import run_micro_batches
from nvfp4_train.precision.runtime import PrecisionRuntime


def validation_metrics(
    chunks: Sequence[Any],
    datasets: Datasets,
    config: DataConfig,
    runtime: PrecisionRuntime,
    world: World,
    *,
    bf16: bool = False,
) -> dict[str, float]:
    """Loss over the run's validation samples, the mean over tokens, however they fill the batches.

    Of several sources each has a loss of its own, and the loss of the whole is their mean by the sources' shares of the
    run's training samples. Random states, histories of delayed scaling and counts of the precision runtime stand
    afterwards as before.

    Args:
        chunks: see `run_micro_batches`; they end in training mode.
        bf16: run all GEMMs in BF16 instead of the recipe's forward pass.

    Returns:
        `val/loss` in nats a token and `val/bits_per_byte`, each with `_bf16` appended for `bf16`, and of several
        sources each with `/NAME` too; nothing where the run asks for no samples.
    """
    if not any(source.validation_samples for source in datasets.sources):
        return {}
    losses = [_loss(chunks, source, config, runtime, world, bf16) for source in datasets.sources]
    suffix = "_bf16" if bf16 else ""
    found: dict[str, float] = {}
    if len(datasets.sources) > 1:
        for source, loss in zip(datasets.sources, losses, strict=True):
            found[f"val/loss{suffix}/{source.name}"] = loss
            found[f"val/bits_per_byte{suffix}/{source.name}"] = bits_per_byte(loss, source.corpus)
    splits = [source.corpus.validation for source in datasets.sources]
    shares = datasets.shares
    loss = math.sumprod(shares, losses)
    bytes_per_token = math.sumprod(shares, [split.bytes / split.tokens for split in splits])
    overall = {f"val/loss{suffix}": loss, f"val/bits_per_byte{suffix}": loss / bytes_per_token / math.log(2)}
    return overall | found


def _loss(
    chunks: Sequence[Any], source: OpenSource, config: DataConfig, runtime: PrecisionRuntime, world: World, bf16: bool
) -> float:
    """Nats a token of one source."""
    batches = list(validation_batches(source, config, data_rank=world.data_rank, data_size=world.data_size))
    for chunk in chunks:
        chunk.eval()
    try:
        with random_states_kept(), runtime.evaluating(bf16=bf16):
            return run_micro_batches(chunks, batches, runtime, world, training=False).mean
    finally:
        for chunk in chunks:
            chunk.train()
