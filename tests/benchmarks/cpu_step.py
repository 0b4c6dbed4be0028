"""Time of a quickstart training step in each recipe over that in BF16, on a CPU, as a table, and what sampling the
health of quantization adds. Run: python -m tests.benchmarks.cpu_step [RECIPE ...]

One step is forward, backward and update over 4,096 tokens, as the trainer does it. Two models stand in one process and
step by turns (A B A B ...), so that other load on the machine weighs on both; the median of the ratios of neighbouring
steps is printed. Milliseconds are medians, too, and only as good as the machine is quiet.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from data.quiet import quiet

with quiet():
    from nvfp4_train.compose import compose
    from nvfp4_train.config import RunConfig
    from nvfp4_train.distributed import process_groups
    from tests.benchmarks.training_step import TrainingStep

BASELINE = "bf16"
TARGETS = {"nvfp4": 3.0}  # largest step time over bf16
HEALTH_EVERY, HEALTH_TARGET = 50, 0.02  # a sample every so many steps costs at most this share of step time
PAIRS = 9


def recipe_names() -> list[str]:
    """Every recipe of `configs/precision`, the baseline first."""
    folder = Path(__file__).parents[2] / "configs" / "precision"
    return sorted((path.stem for path in folder.glob("*.yaml")), key=lambda name: (name != BASELINE, name))


@dataclass(frozen=True)
class Paired:
    """Two things timed by turns: median of `ratios` (second over first), median milliseconds of each."""

    ratios: tuple[float, ...]
    first_ms: float
    second_ms: float

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between them lies the middle half of the ratios."""
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return low, high


def timed_by_turns(first: Callable[[], None], second: Callable[[], None], pairs: int) -> Paired:
    """Time both, one after the other, `pairs` times."""
    seconds: list[list[float]] = [[], []]
    for _ in range(pairs):
        for run, kept in zip((first, second), seconds, strict=True):
            start = time.perf_counter()
            run()
            kept.append(time.perf_counter() - start)
    ratios = tuple(after / before for before, after in zip(*seconds, strict=True))
    return Paired(ratios, *(1e3 * statistics.median(kept) for kept in seconds))


def quickstart(recipe: str) -> RunConfig:
    """The quickstart's configuration in a recipe."""
    return compose(["experiment=quickstart", f"precision={recipe}"])


def step_times(recipes: Iterable[str], pairs: int = PAIRS) -> Iterator[tuple[str, Paired]]:
    """Each recipe with its step over that of the baseline; of the baseline, over a second model of its own."""
    config = quickstart(BASELINE)
    with process_groups(config.parallel, config.seed) as world:
        baseline = TrainingStep(config, world)
        for recipe in recipes:
            yield recipe, timed_by_turns(baseline, TrainingStep(quickstart(recipe), world), pairs)


def health_share(recipe: str, pairs: int = PAIRS) -> float:
    """What sampling health every 50 steps adds to a run in `recipe`, as a share of its step time."""
    config = quickstart(recipe)
    with process_groups(config.parallel, config.seed) as world:
        step = TrainingStep(config, world)
        step(sample_health=True)
        sampled = timed_by_turns(step, lambda: step(sample_health=True), pairs)
    return (sampled.ratio - 1) / HEALTH_EVERY


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=recipe_names(), metavar="RECIPE", help="by default all")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"steps of each by turns (default {PAIRS})")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch (default: all cores)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"quickstart step, 4096 tokens, CPU, {arguments.threads} threads, medians of {arguments.pairs} pairs")
    print(f"{'recipe':<22} {'bf16 ms':>8} {'ms':>8} {'ratio':>6} {'middle half':>13}  target")
    for recipe, paired in step_times(arguments.recipes, arguments.pairs):
        low, high = paired.quartiles
        target = f"<= {TARGETS[recipe]} {verdict(paired.ratio, TARGETS[recipe])}" if recipe in TARGETS else ""
        times = f"{paired.first_ms:>8.0f} {paired.second_ms:>8.0f} {paired.ratio:>6.2f} {low:>6.2f}-{high:<6.2f}"
        print(f"{recipe:<22} {times}  {target}".rstrip(), flush=True)
    share = health_share("nvfp4", arguments.pairs)
    print(
        f"health sampled every {HEALTH_EVERY} steps in nvfp4: {share:.2%} of step time, "
        f"target <= {HEALTH_TARGET:.0%} {verdict(share, HEALTH_TARGET)}"
    )


def verdict(value: float, limit: float) -> str:
    """`met` or `missed`."""
    return "met" if value <= limit else "missed"


if __name__ == "__main__":
    main()
