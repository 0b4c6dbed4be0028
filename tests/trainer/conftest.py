"""A tiny run that trains in a second: four blocks whose widths every recipe can quantize, on text of our own."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nvfp4_train.compose import compose
from nvfp4_train.config import RunConfig

TINY = [
    "model.pattern=M-*-",
    "model.hidden_size=128",
    "model.ffn_hidden_size=256",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.head_dim=32",
    "model.mamba_num_heads=16",
    "model.mamba_head_dim=16",
    "model.mamba_state_dim=28",
    "model.mamba_num_groups=2",
    "model.mamba_chunk_size=32",
    "data.sequence_length=64",
    "data.global_batch=4",
    "data.micro_batch=2",
    "precision.bf16_blocks.last=0",
    "steps=4",
    "checkpoint.every=2",
    "evaluation.every=2",
    "evaluation.sequences=3",
    "logging.wandb=disabled",
]

Make = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small text files."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "and",
        "runs",
        "far",
        "from",
        "wolves",
    ]
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(" ".join(draw.choices(words, k=100)) + "\n")
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the corpus is prepared, once."""
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture
def make(text: Path, prepared: Path, tmp_path: Path, single_process: None) -> Make:
    """`make("nvfp4", "steps=3", run="a")`: the configuration of a tiny run in the folder `a`."""

    def make(precision: str = "bf16", *overrides: str, run: str = "run") -> RunConfig:
        where = [f"data.path={text}", f"data.prepared={prepared}", f"run_dir={tmp_path / run}"]
        return compose([f"precision={precision}", *TINY, *where, *overrides])

    return make
