"""Small models that the tests of this room share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from models.config import ModelConfig

TINY = ModelConfig(
    pattern="M-*M",
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    mamba_num_heads=8,
    mamba_head_dim=8,
    mamba_state_dim=12,
    mamba_num_groups=2,
    mamba_chunk_size=16,
    vocab_size=97,
    vocab_multiple=16,
)
LENGTH = 35


def load_model_config(name: str) -> ModelConfig:
    """A file of configs/model."""
    path = Path(__file__).parents[2] / "configs" / "model" / f"{name}.yaml"
    return ModelConfig(**yaml.safe_load(path.read_text()))


@pytest.fixture(scope="session")
def megatron(single_process: None) -> None:
    """Process groups of one process and Megatron's random-state tracker on the CPU."""
    from megatron.core.tensor_parallel import random as megatron_random

    from models.megatron_cpu import install_cpu_rng, megatron_device

    install_cpu_rng()
    with megatron_device():
        megatron_random.model_parallel_cuda_manual_seed(1)


@pytest.fixture(scope="session")
def build(megatron: None) -> Callable[..., Any]:
    """build(seed=1, **changes of TINY) -> model, made once for equal arguments. Tests must not change its weights."""
    from models.hybrid import build_model
    from tests.models.plain_linears import PLAIN

    made: dict[Any, Any] = {}

    def make(seed: int = 1, **changes: Any) -> Any:
        key = (seed, *sorted(changes.items()))
        if key not in made:
            made[key] = build_model(replace(TINY, **changes), PLAIN, sequence_length=LENGTH, seed=seed)
        made[key].zero_grad()
        return made[key]

    return make


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    """[2, 36] token ids: 35 inputs and, one later, 35 labels."""
    return torch.randint(0, TINY.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
