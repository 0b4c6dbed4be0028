"""Validation: nats a token and bits a byte, without a trace in the training that goes on afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data.config import DataConfig
from data.corpus import bits_per_byte
from data.loading import Datasets, validation_batches
from nvfp4_train.distributed import World
from nvfp4_train.passes import run_micro_batches
from nvfp4_train.precision.runtime import PrecisionRuntime
from nvfp4_train.random_state import random_states_kept


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

    Random states, histories of delayed scaling and counts of the precision runtime stand afterwards as before.

    Args:
        chunks: see `run_micro_batches`; they end in training mode.
        bf16: run all GEMMs in BF16 instead of the recipe's forward pass.

    Returns:
        `val/loss` in nats a token and `val/bits_per_byte`, each with `_bf16` appended for `bf16`; nothing where the run
        asks for no samples.
    """
    if datasets.validation_samples == 0:
        return {}
    batches = list(validation_batches(datasets, config, data_rank=world.data_rank, data_size=world.data_size))
    for chunk in chunks:
        chunk.eval()
    try:
        with random_states_kept(), runtime.evaluating(bf16=bf16):
            loss = run_micro_batches(chunks, batches, runtime, world, training=False).mean
    finally:
        for chunk in chunks:
            chunk.train()
    suffix = "_bf16" if bf16 else ""
    return {f"val/loss{suffix}": loss, f"val/bits_per_byte{suffix}": bits_per_byte(loss, datasets.corpus)}
