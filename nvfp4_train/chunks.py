"""What a rank holds of the model: one chunk, or several where pipeline stages are interleaved."""

from __future__ import annotations

from typing import Any

import torch

from models.hybrid import LinearClasses, build_model
from nvfp4_train.config import RunConfig
from nvfp4_train.precision.linear import QuantizedColumnParallelLinear, QuantizedRowParallelLinear


def build_chunks(config: RunConfig, device: str | torch.device) -> list[Any]:
    """All chunks of this rank in the order of the model, with their initial weights (without on the meta device).

    Raises ModelError for a model that cannot be built or split this way.
    """
    return [_chunk(config, number, device) for number in range(config.parallel.virtual_pipeline)]


def _chunk(config: RunConfig, number: int, device: str | torch.device) -> Any:
    parallel = config.parallel
    return build_model(
        config.model,
        LinearClasses(QuantizedColumnParallelLinear, QuantizedRowParallelLinear),
        sequence_length=config.data.sequence_length,
        seed=config.seed,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        sequence=parallel.sequence,
        context=parallel.context,
        virtual_pipeline=parallel.virtual_pipeline,
        virtual_stage=number if parallel.virtual_pipeline > 1 else None,
        device=device,
    )
