"""Whether two runs are the same, bit for bit: metrics, and everything that the last checkpoint holds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from nvfp4_train.checkpoints.files import damage, step_folder
from nvfp4_train.metrics import read_metrics

TIMED = ("time/step_s", "time/data_s", "throughput/tokens_per_s", "memory/peak_gib")


def first_difference(whole: Path, other: Path, steps: int) -> str:
    """What differs first between two run folders of so many steps; empty where nothing does."""
    expected, lines = (read_metrics(path / "metrics.jsonl") for path in (whole, other))
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        return f"metrics of steps {[line['step'] for line in lines]}"
    for one, two in zip(expected, lines, strict=True):
        for name in {**one, **two}:
            if name not in TIMED and one.get(name) != two.get(name):
                return f"{name} of step {one['step']}: {two.get(name)}, not {one.get(name)}"
    found = []
    for path in (whole, other):
        checkpoint = step_folder(path / "checkpoints", steps)
        problem = damage(checkpoint)
        if problem is not None:
            return f"{checkpoint}: {problem}"
        found.append(state(checkpoint))
    return _first_tensor(*found)


def _first_tensor(whole: dict[str, Any], other: dict[str, Any]) -> str:
    kinds = ("decoder.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    missing = [kind for kind in kinds if not any(name.startswith(kind) for name in whole)]
    if missing or whole.keys() != other.keys():
        return f"checkpoints hold no {missing[0]}" if missing else f"only in one: {min(whole.keys() ^ other.keys())}"
    for name, value in whole.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        if not same:
            return f"{name} in the checkpoint"
    return ""


def state(checkpoint: Path) -> dict[str, Any]:
    """Weights, moments, counts of steps and amax histories, by dotted name."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(_leaves(dist_checkpointing.load_plain_tensors(str(checkpoint)), ""))


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{name}.{number}")
    else:
        yield name, tree
