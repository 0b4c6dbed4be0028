"""Ranges and choices of single values, in one place. No torch here.

What several values must agree on is checked by `nvfp4_train.layout`, sizes of a model by `models.shapes`, and what a
recipe allows by `nvfp4_train.precision`.
"""

from __future__ import annotations

import re
from typing import Any

from data.config import PACKINGS
from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.precision.validation import BACKENDS, GEMMS
from nvfp4_train.schema import did_you_mean, shown

MOST = 2**63 - 1  # of what is counted, or seeds a generator, in 64 bits
AT_LEAST: dict[str, int] = {
    "steps": 1,
    "seed": 0,
    "stop_after": 1,
    "data.sequence_length": 2,
    "data.global_batch": 1,
    "data.micro_batch": 1,
    "data.workers": 0,
    "data.max_bad_documents": 0,
    "data.processes": 0,
    "tokenizer.vocab_size": 1,
    "tokenizer.megabytes": 1,
    "optimizer.clip": 0,
    "optimizer.weight_decay": 0,
    "optimizer.max_skipped": 1,
    "schedule.min_lr_ratio": 0,
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "parallel.virtual_pipeline": 1,
    "parallel.context": 1,
    "parallel.expert": 1,
    "parallel.timeout": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 0,
    "checkpoint.keep_every": 0,
    "evaluation.every": 0,
    "evaluation.sequences": 0,
    "logging.health_every": 0,
    "debug.profile": 0,
    "precision.amax_history": 1,
}
ABOVE_ZERO = ("optimizer.lr", "optimizer.eps")
BELOW_ONE = ("optimizer.beta1", "optimizer.beta2", "data.validation_share")
AT_MOST: dict[str, int] = {"schedule.min_lr_ratio": 1, "seed": MOST}
CHOICES: dict[str, tuple[str, ...]] = {
    "data.packing": PACKINGS,
    "schedule.decay_style": ("linear", "cosine", "exponential", "minus_sqrt"),
    "logging.wandb": ("auto", "online", "offline", "disabled"),
    "precision.backend": BACKENDS,
    "precision.gemm": GEMMS,
    "model.recompute": ("none", "selective", "full"),
    "model.kernels": ("auto", "torch", "mamba_ssm"),
}


def check_values(config: RunConfig) -> None:
    """Raises ConfigError for the first value that is out of its range or none of its choices."""
    if not re.fullmatch(r"[\w.+-]+", config.name):
        raise ConfigError(
            f"name: becomes part of a folder's name; use letters, digits and . _ + -, not {config.name!r}."
        )
    for key, least in AT_LEAST.items():
        value = value_at(config, key)
        if value is not None and value < least:
            raise ConfigError(f"{key}: wanted {least} or more, got {value}.")
    for key in ABOVE_ZERO:
        if not value_at(config, key) > 0:
            raise ConfigError(f"{key}: wanted a number above 0, got {value_at(config, key)}.")
    for key in BELOW_ONE:
        if not 0 <= value_at(config, key) < 1:
            raise ConfigError(f"{key}: wanted a number from 0 to below 1, got {value_at(config, key)}.")
    for key, most in AT_MOST.items():
        if value_at(config, key) > most:
            raise ConfigError(f"{key}: wanted {most} or less, got {value_at(config, key)}.")
    _check_count(config)
    for key, choices in CHOICES.items():
        value = value_at(config, key)
        if value not in choices:
            near = did_you_mean(value, choices)
            raise ConfigError(f"{key}: wanted one of {', '.join(choices)}, got {shown(value)}.{near}")


def _check_count(config: RunConfig) -> None:
    tokens = config.steps * config.data.global_batch * config.data.sequence_length
    if tokens > MOST:
        raise ConfigError(
            f"steps={config.steps}: steps * data.global_batch * data.sequence_length = {tokens:.1e} tokens, more than "
            f"can be counted ({MOST:.1e}). Write fewer steps."
        )


def value_at(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config
