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
    from models.megatron_cpu import megatron_device
    from nvfp4_train.compose import compose
    from nvfp4_train.config import RunConfig
    from nvfp4_train.distributed import World, process_groups
    from nvfp4_train.gradients import clip_gradients, gradient_norm
    from nvfp4_train.optimizer import build_optimizer, set_learning_rate, wrap_data_parallel
    from nvfp4_train.passes import Batch, run_micro_batches
    from nvfp4_train.precision.phases import Passes
    from nvfp4_train.setup import build_quantized_model

BASELINE = "bf16"
TARGETS = {"nvfp4": 3.0}  # largest step time over bf16
HEALTH_EVERY, HEALTH_TARGET = 50, 0.02  # a sample every so many steps costs at most this share of step time
PAIRS, WARM_UP = 9, 2


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


class TrainingStep:
    """A quickstart model in one recipe; each call is one optimizer step on the same random tokens.

    What the trainer does around it (reading data, hashing batches, logging) is left out: the same in every recipe.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        quantized = build_quantized_model(config, world, say=lambda text: None)
        self.config, self.world = config, world
        self.model, self.runtime = quantized.model, quantized.runtime
        self.parallel_model = wrap_data_parallel(self.model, config.parallel)
        self.optimizer = build_optimizer(config.optimizer, config.parallel, self.parallel_model)
        self.batches = random_batches(config)
        self.step = 0
        for _ in range(WARM_UP):
            self()

    def __call__(self, sample_health: bool = False) -> None:
        """One step; with `sample_health`, health is measured on its first micro-batch and read off."""
        self.runtime.sample_health = sample_health
        self.runtime.begin_step(self.step, Passes())
        with megatron_device():
            self.parallel_model.zero_grad_buffer()
            self.optimizer.zero_grad()
        run_micro_batches(self.parallel_model, self.batches, self.runtime, self.world, training=True)
        norm = gradient_norm(self.model)
        self.runtime.end_step()
        clip_gradients(self.parallel_model, norm, self.config.optimizer.clip)
        set_learning_rate(self.optimizer, self.config.optimizer.lr)
        with megatron_device():
            self.optimizer.step()
        self.runtime.weights_changed()
        if sample_health:
            assert self.runtime.health.metrics()
        self.step += 1


def random_batches(config: RunConfig) -> list[Batch]:
    """The micro-batches of one global batch of random bytes, every token valid."""
    data, generator = config.data, torch.Generator().manual_seed(config.seed)
    shape = (data.micro_batch, data.sequence_length)
    batches = []
    for _ in range(data.global_batch // data.micro_batch):
        text = torch.randint(0, 256, (shape[0], shape[1] + 1), generator=generator)
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        batches.append({"tokens": tokens, "labels": labels, "loss_mask": torch.ones(shape)})
    return batches


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
