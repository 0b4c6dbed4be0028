"""On a GPU, with deterministic=true: the same bits from the same run, and from one that was resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nvfp4_train.compose import compose
from nvfp4_train.trainer import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KEPT = ("train/loss", "optim/grad_norm", "data/hash")


def curve(folder: Path, precision: str, *overrides: str) -> list[tuple[object, ...]]:
    """What the log says of every step after a run of 8 steps, or of what was left of it."""
    size = (
        "experiment=quickstart",
        "model.mamba_head_dim=64",
        "model.mamba_num_heads=8",
        "steps=8",
        "checkpoint.every=4",
    )
    quiet = ("logging.wandb=disabled", "evaluation.every=0", "evaluation.sequences=0", f"run_dir={folder}")
    train(compose([*size, *quiet, f"precision={precision}", *overrides]))
    steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [tuple(step[name] for name in KEPT) for step in steps]


@pytest.mark.parametrize("precision", ["bf16", "nvfp4", "fp8_delayed"])
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_the_same_bits_again_and_after_a_resume(precision: str, packing: str, tmp_path: Path) -> None:
    chosen = (precision, f"data.packing={packing}")
    whole = curve(tmp_path / "whole", *chosen)
    assert len(whole) == 8
    assert curve(tmp_path / "again", *chosen) == whole
    curve(tmp_path / "resumed", *chosen, "stop_after=5")
    assert curve(tmp_path / "resumed", *chosen) == whole
    starts = json.loads((tmp_path / "resumed" / "environment.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 4]
