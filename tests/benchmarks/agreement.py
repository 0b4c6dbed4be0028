"""How close layouts come to one process over the first steps of the quickstart, and how close anything can come.

python -m tests.benchmarks.agreement --seeds 1 2 3 4 --folder runs/agreement
python -m tests.benchmarks.agreement --processes 8 --seeds 1

Prints, for each recipe and seed, the largest and the mean relative difference of the loss over 8 steps: of layouts
of two and four processes, or of eight, and of one process in which one number of one activation was moved to its
neighbour in BF16 (`tests.parallel.nudged`). Runs that are in the folder are not made again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

from nvfp4_train.metrics import read_metrics
from tests.parallel.launches import launch

STEPS, NUDGES = 8, 8
SHORT = [
    f"stop_after={STEPS}",
    "checkpoint.every=0",
    "evaluation.every=0",
    "evaluation.sequences=0",
    "logging.wandb=disabled",
]
TENSOR, SEQUENCE, REPLICAS = "parallel.tensor=2", "parallel.sequence=true", "parallel=replicas"
ALONE, NUDGED = "one process", {f"nudge {number}": [f"nudge={number}"] for number in range(1, NUDGES + 1)}
Layouts = dict[int, dict[str, list[str]]]
FEW: Layouts = {
    1: {ALONE: [], **NUDGED},
    2: {"tensor": [TENSOR], "tensor, sequence": [TENSOR, SEQUENCE], "context": ["parallel.context=2"]},
    4: {"tensor, pipeline": [TENSOR, SEQUENCE, "parallel.pipeline=2"]},
}
# Eight replicas take a micro-batch each, and four ranks divide Mamba's groups.
DIVIDED = ["data.micro_batch=2", "model.mamba_num_groups=4"]
EIGHT: Layouts = {
    1: {ALONE: [], **NUDGED},
    8: {
        "data 8": [REPLICAS],
        "tensor 2, data 4": [REPLICAS, TENSOR, SEQUENCE],
        "tensor 2, pipeline 2, data 2": [REPLICAS, TENSOR, SEQUENCE, "parallel.pipeline=2"],
        "tensor 4, context 2": ["parallel.tensor=4", SEQUENCE, "parallel.context=2"],
    },
}
SETS: dict[int, tuple[Layouts, list[str]]] = {2: (FEW, []), 8: (EIGHT, DIVIDED)}  # with overrides of all runs


def place(folder: Path, recipe: str, seed: int, layout: str) -> Path:
    """Run folder of a layout."""
    return folder / f"{recipe}-{seed}-{layout.replace(', ', '-').replace(' ', '-')}"


def losses(folder: Path) -> list[float]:
    """Of the first steps, as far as they are there."""
    file = folder / "metrics.jsonl"
    return [line["train/loss"] for line in read_metrics(file)] if file.exists() else []


def train(folder: Path, layouts: Layouts, always: Sequence[str], recipe: str, seed: int) -> None:
    """All layouts of a recipe and seed that are not there."""
    jobs = {
        processes: {
            layout: [*SHORT, *always, f"precision={recipe}", f"seed={seed}", f"data.prepared={folder / 'prepared'}",
                     f"run_dir={place(folder, recipe, seed, layout)}", *overrides]
            for layout, overrides in named.items()
            if len(losses(place(folder, recipe, seed, layout))) < STEPS
        }
        for processes, named in layouts.items()
    }  # fmt: skip
    missing = {processes: named for processes, named in jobs.items() if named}
    if missing:
        number = len(list(folder.glob("launch-*")))
        launch(folder / f"launch-{number}", missing, "tests.parallel.nudged", timeout=7200)


def differences(folder: Path, recipe: str, seed: int, layout: str) -> list[float]:
    """Relative differences of the loss to that of one process, by step."""
    alone = losses(place(folder, recipe, seed, ALONE))
    return [abs(loss / one - 1) for loss, one in zip(losses(place(folder, recipe, seed, layout)), alone, strict=True)]


def table(folder: Path, layouts: Layouts, recipes: Sequence[str], seeds: Sequence[int]) -> str:
    """Markdown: a row for each recipe and seed, largest and mean difference in units of 1e-4."""
    several = [name for processes, named in layouts.items() if processes > 1 for name in named]
    lines = [
        "| recipe, seed | " + " | ".join([*several, f"one number moved, {NUDGES} times"]) + " |",
        "|---" * (len(several) + 2) + "|",
    ]
    for recipe in recipes:
        for seed in seeds:
            found = [differences(folder, recipe, seed, name) for name in several]
            nudged = [differences(folder, recipe, seed, name) for name in NUDGED]
            cells = [f"{1e4 * max(each):.2g} ({1e4 * sum(each) / len(each):.2g})" for each in found]
            floor = ", ".join(f"{1e4 * max(each):.2g}" for each in nudged)
            lines.append(f"| {recipe}, {seed} | " + " | ".join([*cells, floor]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Do what is missing and print the table."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.agreement")
    parser.add_argument("--recipes", nargs="+", default=["nvfp4", "bf16"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--processes", type=int, choices=SETS, default=2, help="2 (and 4), or 8")
    parser.add_argument("--folder", type=Path, default=Path("runs/agreement"))
    arguments = parser.parse_args()
    layouts, always = SETS[arguments.processes]
    folder = arguments.folder.resolve() / f"up-to-{max(layouts)}"
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in arguments.recipes:
        for seed in arguments.seeds:
            train(folder, layouts, always, recipe, seed)
            print(table(folder, layouts, [recipe], [seed]), flush=True)
    print(f"\nlargest (mean) over {STEPS} steps, in 1e-4 of the loss")
    print(table(folder, layouts, arguments.recipes, arguments.seeds))


if __name__ == "__main__":
    main()
