"""Our FP8 GEMMs beside Transformer Engine's: the same model, text and seed trained through each, loss by loss.
Run on a GPU with Transformer Engine: python -m tests.benchmarks.te_peer [--steps N] [RECIPE ...]

Two runs of one recipe part by what differs in them: random bits of a sum's order grow step by step. How far that goes
is read off two runs that differ in nothing else, ours on the tensor cores and emulated: the noise. Transformer Engine
tracks ours where it stays as near. BF16 is the distance of another recipe.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from data.quiet import quiet

with quiet():
    from nvfp4_train.compose import compose
    from nvfp4_train.trainer import train
    from tests.benchmarks.card import need_card

RECIPES = ("fp8_block", "fp8_current", "fp8_delayed")
BASE = ("experiment=quickstart", "logging.wandb=disabled", "checkpoint.every=0", "evaluation.every=0")


def losses(folder: Path, recipe: str, backend: str, steps: int) -> list[float]:
    """Training loss of every step of a run."""
    run = folder / f"{recipe}-{backend}"
    chosen = (f"precision={recipe}", f"precision.backend={backend}", f"steps={steps}", f"run_dir={run}")
    assert train(compose([*BASE, *chosen])) == 0
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean distance of two curves over their second half, in nats."""
    half = len(one) // 2
    return statistics.fmean(abs(a - b) for a, b in zip(one[half:], other[half:], strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", default=RECIPES)
    parser.add_argument("--steps", type=int, default=50)
    chosen = parser.parse_args(arguments)
    need_card()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {chosen.steps} steps of the quickstart")
    columns = ("first", "TE first", "last", "TE last", "noise", "to TE", "to BF16")
    rows = [f"{'recipe':<12} " + " ".join(f"{column:>10}" for column in columns)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bf16 = losses(folder, "bf16", "auto", chosen.steps)
        for recipe in chosen.recipes:
            ours = losses(folder, recipe, "native", chosen.steps)
            emulated = losses(folder, recipe, "emulated", chosen.steps)
            theirs = losses(folder, recipe, "transformer_engine", chosen.steps)
            distances = (apart(ours, other) for other in (emulated, theirs, bf16))
            cells = (ours[0], theirs[0], ours[-1], theirs[-1], *distances)
            rows.append(f"{recipe:<12} " + " ".join(f"{cell:10.4f}" for cell in cells))
            print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
