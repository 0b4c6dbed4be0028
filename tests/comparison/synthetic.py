"""Run folders made from known curves: what the comparison says of them can be checked. No torch here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKENS_PER_STEP = 4096


def true_loss(tokens: NDArray[Any] | float) -> NDArray[np.float64]:
    """A smooth loss in nats, from about 6 after the first step of 4096 tokens to about 2.9 after 2000."""
    return 2.2 + 3.8 * (1 + np.asarray(tokens, dtype=float) / 3e4) ** -0.3


def correlated(rng: np.random.Generator, steps: int, deviation: float, memory: float) -> NDArray[np.float64]:
    """AR(1) noise of the given standard deviation: each step keeps `memory` of the one before."""
    noise = np.empty(steps)
    noise[0] = rng.standard_normal()
    fresh = rng.standard_normal(steps) * np.sqrt(1 - memory**2)
    for step in range(1, steps):
        noise[step] = memory * noise[step - 1] + fresh[step]
    return deviation * noise


def losses(
    *,
    steps: int = 2000,
    gap: float = 0.0,
    batch_seed: int = 0,
    own_seed: int = 0,
    batch_noise: float = 0.03,
    own_noise: float = 0.003,
    memory: float = 0.7,
    tokens_per_step: int = TOKENS_PER_STEP,
) -> NDArray[np.float64]:
    """Losses `gap` percent above `true_loss`: noise of the batches by `batch_seed`, the run's own by `own_seed`."""
    tokens = tokens_per_step * np.arange(1, steps + 1)
    batches = batch_noise * np.random.default_rng([batch_seed, 1]).standard_normal(steps)
    own = correlated(np.random.default_rng([own_seed, 2]), steps, own_noise, memory)
    return true_loss(tokens) * (1 + gap / 100) + batches + own


def config(seed: int = 1, **changes: Any) -> dict[str, Any]:
    """A small configuration like the one a run saves."""
    return {
        "model": {"pattern": "M-M*", "hidden_size": 128},
        "precision": {"name": "nvfp4"},
        "seed": seed,
        "steps": 2000,
        **changes,
    }


def make_run(
    folder: Path,
    train: NDArray[np.float64],
    *,
    val: Mapping[int, float] | None = None,
    batch_seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    hashes: bool = True,
    tokens_per_step: int = TOKENS_PER_STEP,
    first_step: int = 1,
    extra: Mapping[int, Mapping[str, Any]] | None = None,
) -> Path:
    """Write a run folder: a line a step with `train`, and by step `val` and `extra`; config.yaml with `settings`."""
    folder.mkdir(parents=True)
    lines = []
    for index, loss in enumerate(train):
        step = first_step + index
        line: dict[str, Any] = {"step": step, "tokens": step * tokens_per_step}
        line["train/loss"] = float(loss) if np.isfinite(loss) else None
        if hashes:
            line["data/hash"] = hashlib.sha256(f"{batch_seed} {step}".encode()).hexdigest()[:16]
        if val and step in val:
            line["val/loss"] = val[step]
        line |= (extra or {}).get(step, {})
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if settings is not None:
        (folder / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return folder
