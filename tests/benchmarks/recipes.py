"""Trains the quickstart model in every recipe and compares each with BF16. Run: make recipes

    runs/recipes/<recipe>-seed<N>     the runs; one that was interrupted goes on, a finished one is not trained again
                                      (delete the folder to train anew after a change of the code)
    tests/benchmarks/results/         recipes.csv, recipes.png, recipes.md
    configs/precision/*.md            the tables under 'Measured here'

With --recipes, the results stay in the folder of the runs and the pages as they are. One core trains one run: small
models gain little from a second thread. Step times are not those of the runs, which share the machine, but taken
afterwards by turns with BF16 in one process (cpu_step.py).
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from nvfp4_train.comparison.pictures import png
from nvfp4_train.comparison.runs import Group, open_run
from nvfp4_train.environment import versions
from tests.benchmarks.cpu_step import PAIRS, recipe_names, step_times
from tests.benchmarks.recipes_table import (
    BASELINE,
    Row,
    fill_page,
    gap_picture,
    make_rows,
    reading,
    to_csv,
    whole_page,
    worse_or_not,
)
from tests.benchmarks.training_runs import ROOT, RunFailed, failure, finished, start_training

RESULTS, PAGES = ROOT / "tests" / "benchmarks" / "results", ROOT / "configs" / "precision"
SEVERAL_SEEDS = {BASELINE: 3, "nvfp4": 3, "mxfp4": 3}
STEPS = 150


def planned_runs(recipes: Sequence[str]) -> list[tuple[str, int]]:
    """(recipe, seed), the first seed of every recipe before the others, the baseline first."""
    runs = [(recipe, seed) for recipe in recipes for seed in range(1, SEVERAL_SEEDS.get(recipe, 1) + 1)]
    return sorted(runs, key=lambda run: run[1])


def overrides(recipe: str, seed: int, steps: int, path: Path) -> list[str]:
    """What is typed to train one run."""
    return [
        "experiment=quickstart",
        f"precision={recipe}",
        f"seed={seed}",
        f"steps={steps}",
        f"run_dir={path}",
        "logging=off",
        "evaluation.every=0",
        "evaluation.sequences=128",
        "checkpoint.every=50",
        "checkpoint.keep=1",
    ]


def train(path: Path, arguments: Sequence[str], threads: int) -> float:
    """Train one run to its end in a process of its own, its output in `<path>.log`; returns the seconds it took."""
    start = time.monotonic()
    code = start_training(path, arguments, threads).wait()
    if code:
        raise failure(path, code)
    return time.monotonic() - start


def train_all(runs: Mapping[Path, Sequence[str]], jobs: int) -> None:
    """Train what is not finished, `jobs` at a time. After a failure or Ctrl-C none is started any more."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    missing = {path: arguments for path, arguments in runs.items() if not finished(path, arguments)}
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are there already", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        pending = {pool.submit(train, path, arguments, threads): path for path, arguments in missing.items()}
        try:
            for count, future in enumerate(as_completed(pending), 1):
                seconds = future.result()
                print(f"{pending[future].name:<32} {seconds:5.0f} s, {len(pending) - count} to go", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def measure(recipes: Sequence[str], pairs: int, threads: int) -> dict[str, float]:
    """Step time of each recipe over the baseline's."""
    torch.set_num_threads(threads)
    ratios = {BASELINE: 1.0}
    for recipe, paired in step_times([name for name in recipes if name != BASELINE], pairs):
        ratios[recipe] = paired.ratio
        low, high = paired.quartiles
        print(f"step time {recipe:<22} {paired.ratio:5.2f} x {BASELINE} (middle half {low:.2f}-{high:.2f})", flush=True)
    return ratios


def facts(rows: Sequence[Row], steps: int, tokens: int, threads: int, pairs: int) -> list[str]:
    """How the table came about."""
    several = sorted(f"`{row.recipe}` {len(row.seeds)}" for row in rows if len(row.seeds) > 1)
    seeds = f"seeds: {', '.join(several)}, the others one" if several else "one seed"
    used = [f"{name} {number}" for name, number in versions().items() if name in ("python", "torch", "megatron-core")]
    return [
        f"Measured {datetime.date.today().isoformat()}: {steps} steps of {tokens // steps:,} tokens, {seeds}, on a CPU "
        f"with {os.cpu_count()} cores ({', '.join(used)}). Step times: {threads} of them, {pairs} pairs of steps a "
        "recipe.",
        reading(),
        "Runs this short show that recipes train and how they rank; the gap of a large run is another.",
    ]


def write_results(
    groups: dict[str, Group], ratios: dict[str, float], out: Path, pages: Path | None, threads: int, pairs: int
) -> None:
    """CSV, picture and page into `out`, and the tables in `pages` where given."""
    rows = make_rows(groups, ratios)
    curve = groups[BASELINE].runs[0].train
    steps, tokens = len(curve), int(curve.tokens[-1])
    said = facts(rows, steps, tokens, threads, pairs)
    if {"nvfp4", "mxfp4"} <= groups.keys():
        said.append(worse_or_not(groups["nvfp4"], groups["mxfp4"]))
    out.mkdir(parents=True, exist_ok=True)
    (out / "recipes.csv").write_text(to_csv(rows))
    (out / "recipes.md").write_text(whole_page(rows, said))
    (out / "recipes.png").write_bytes(png(gap_picture(rows, f"Every recipe after {steps} steps ({tokens:,} tokens)")))
    if pages is not None:
        caption = (
            f"{steps} steps of {tokens // steps:,} tokens, {datetime.date.today().isoformat()}. How it was measured, "
            "and all recipes in one table: `tests/benchmarks/results/recipes.md`."
        )
        by_name = {row.recipe: row for row in rows}
        for path in sorted(pages.glob("*.md")):
            path.write_text(fill_page(path.read_text(), by_name, caption))
    print(said[-1])
    print(f"written to {out}: recipes.csv, recipes.png, recipes.md" + (f"; tables in {pages}" if pages else ""))


def main() -> int:
    """Train, measure, compare, write; returns the exit code."""
    every, cores = recipe_names(), os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of every run (default {STEPS})")
    parser.add_argument("--recipes", help="some of them, by commas; bf16 must be there (default: all)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "recipes", help="of the runs")
    parser.add_argument("--jobs", type=int, default=cores, help="runs at a time (default: one a core)")
    parser.add_argument("--threads", type=int, default=cores, help="of the step timing (default: all cores)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"of steps in the step timing (default {PAIRS})")
    arguments = parser.parse_args()
    recipes = arguments.recipes.split(",") if arguments.recipes else every
    if BASELINE not in recipes or not set(recipes) <= set(every):
        parser.error(f"--recipes {arguments.recipes}: wanted {BASELINE} and some of {', '.join(every)}")
    whole, folder = set(recipes) == set(every), arguments.folder.resolve()
    paths = {run: folder / f"{run[0]}-seed{run[1]}" for run in planned_runs(recipes)}
    runs = {path: overrides(*run, arguments.steps, path) for run, path in paths.items()}
    try:
        train_all(runs, arguments.jobs)
    except RunFailed as failure:
        print(failure, file=sys.stderr)
        return failure.code
    ratios = measure(recipes, arguments.pairs, arguments.threads)
    groups = {
        recipe: Group(recipe, tuple(open_run(path) for (name, _), path in paths.items() if name == recipe))
        for recipe in recipes
    }
    out, pages = (RESULTS, PAGES) if whole else (folder, None)
    write_results(groups, ratios, out, pages, arguments.threads, arguments.pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
