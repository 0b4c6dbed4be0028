"""Whole training steps on a GPU, as a table: recipes against BF16, and BF16 against Megatron-Core's own classes; peak
memory against the plan, idle time, where the time goes. Run: python -m tests.benchmarks.gpu_step [CASE ...] [--profile]

A step is forward, backward and update as the trainer does it, on random tokens of the whole vocabulary. All cases run
one after another in one process on one card. `eager` after a case's name measures it without CUDA graphs. Without
`--deterministic` kernels may add in any order. mamba-ssm's run in our tiles, Megatron-Core's step included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from data.quiet import quiet

with quiet():
    from models.shapes import flops_per_token, linear_shapes
    from nvfp4_train.cards import bf16_peak
    from nvfp4_train.compose import compose
    from nvfp4_train.config import RunConfig
    from nvfp4_train.distributed import World, process_groups
    from nvfp4_train.layout import choose_backend
    from nvfp4_train.memory import Machine, memory
    from nvfp4_train.precision.assignment import assign
    from tests.benchmarks.card import need_card
    from tests.benchmarks.training_step import TrainingStep

MEGATRON = "megatron"  # in a case's name: not our step, but Megatron-Core's
WARM_UP, STEPS = 4, 8
FEW, MANY = 3, 40  # kernels listed of each case, the longest first
WHOLE_1B = ("experiment=1b", "data.global_batch=4")
BLOCKS_12B = (
    "experiment=1b",
    "data.global_batch=2",
    "data.micro_batch=2",
    "model.pattern=M-M-M-M*-",
    "model.hidden_size=5120",
    "model.ffn_hidden_size=20480",
    "model.num_attention_heads=40",
    "model.mamba_num_heads=160",
)
NANO = ("experiment=nano", "data.micro_batch=64")
ALL_QUANTIZED = ("precision.bf16_blocks.first=0", "precision.bf16_blocks.last=0")
CASES: dict[str, tuple[str, ...]] = {
    "1b bf16": (*WHOLE_1B, "precision=bf16"),
    "1b megatron": (*WHOLE_1B, "precision=bf16"),
    "1b nvfp4": (*WHOLE_1B, "precision=nvfp4"),
    "1b fp8_block": (*WHOLE_1B, "precision=fp8_block"),
    "1b fp8_current": (*WHOLE_1B, "precision=fp8_current"),
    "1b fp8_delayed": (*WHOLE_1B, "precision=fp8_delayed"),
    "12b bf16": (*BLOCKS_12B, "precision=bf16"),
    "12b megatron": (*BLOCKS_12B, "precision=bf16"),
    "12b fp8_block": (*BLOCKS_12B, "precision=fp8_block", *ALL_QUANTIZED),
    "12b fp8_current": (*BLOCKS_12B, "precision=fp8_current", *ALL_QUANTIZED),
    "12b fp8_delayed": (*BLOCKS_12B, "precision=fp8_delayed", *ALL_QUANTIZED),
    "12b nvfp4": (*BLOCKS_12B, "precision=nvfp4", *ALL_QUANTIZED),
    "nano bf16": (*NANO, "precision=bf16"),
    "nano nvfp4": (*NANO, "precision=nvfp4"),
    "1b bf16 recompute": (*WHOLE_1B, "precision=bf16", "model.recompute=full"),
}
# The same without CUDA graphs: `1b bf16 eager`.
CASES |= {
    f"{name} eager": (*overrides, "parallel.cuda_graphs=never")
    for name, overrides in CASES.items()
    if not name.endswith(MEGATRON)
}


@dataclass(frozen=True)
class Measured:
    """Of one case.

    Attributes:
        step_ms: median of steps that begin and end with an idle GPU.
        steady_ms: of one among many, one right after another.
        handed_ms: median of what the CPU needs to hand a step to the GPU.
        peak, planned: bytes.
        idle: share of a steady step in which no kernel runs.
    """

    step_ms: float
    steady_ms: float
    handed_ms: float
    peak: int
    planned: int
    idle: float
    tokens: int
    flops: int


def measure(build: Callable[[], Callable[[], None]], config: RunConfig, show_profile: bool) -> Measured:
    """Build and warm up, time, profile."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step = build()
    whole, handed = [], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        handed.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - before
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    steady = (time.perf_counter() - start) / STEPS
    kernels, busy = profiled(step)
    for name, (microseconds, count) in kernels[: MANY if show_profile else FEW]:
        print(f"    {microseconds / 1e3:8.2f} ms {count:5d}  {name[:110]}")
    assignments = assign(config.precision, linear_shapes(config.model))
    native = choose_backend(config, torch.cuda.get_device_capability()).name == "native"
    tokens = config.data.micro_batch * config.data.sequence_length
    return Measured(
        1e3 * statistics.median(whole),
        1e3 * steady,
        1e3 * statistics.median(handed),
        peak,
        memory(config.model, assignments, tokens, Machine(native=native)).total,
        1 - busy / (1e6 * steady),
        config.data.global_batch * config.data.sequence_length,
        flops_per_token(config.model, config.data.sequence_length).training,
    )


def profiled(step: Callable[[], None]) -> tuple[list[tuple[str, tuple[float, int]]], float]:
    """Kernels of one step by total time in microseconds, and in how many of these any of them runs."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    spans, totals = [], defaultdict(lambda: (0.0, 0))
    for event in profiler.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            total, count = totals[event.name]
            totals[event.name] = (total + event.time_range.elapsed_us() / 2, count + 1)
    spans.sort()
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return sorted(totals.items(), key=lambda item: -item[1][0]), busy / 2


def row(name: str, found: Measured, baseline: float | None) -> str:
    """A line of the table."""
    peak = bf16_peak(torch.cuda.get_device_name())
    rate = found.tokens * found.flops / found.step_ms / 1e9
    share = "" if peak is None else f"{rate / peak:6.1%}"
    ratio = "" if baseline is None else f"{found.step_ms / baseline:6.3f}"
    return (
        f"{name:<24} {found.step_ms:8.1f} {ratio:>6} {found.steady_ms:8.1f} {found.handed_ms:8.1f} {found.idle:6.1%} "
        f"{rate:7.0f} {share:>6} {found.peak / 2**30:7.2f} {found.planned / 2**30:7.2f} "
        f"{found.planned / found.peak:6.3f}"
    )


def _step(config: RunConfig, world: World, megatron: bool) -> Callable[[], None]:
    """A warm training step, ours or Megatron's."""
    if not megatron:
        return TrainingStep(config, world, warm_up=WARM_UP, quick_weights=True)
    from tests.benchmarks.megatron_step import MegatronStep

    return MegatronStep(config, warm_up=WARM_UP)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"by default all of: {', '.join(CASES)}")
    parser.add_argument("--profile", action="store_true", help=f"list {MANY} kernels of each case, not {FEW}")
    parser.add_argument("--deterministic", action="store_true", help="only kernels that add in one fixed order")
    chosen = parser.parse_args(arguments)
    need_card()
    columns = (
        ("ms", 8),
        ("/bf16", 6),
        ("steady", 8),
        ("handed", 8),
        ("idle", 6),
        ("TFLOP/s", 7),
        ("MFU", 6),
        ("GiB", 7),
    )
    header = " ".join([f"{'case':<24}", *(f"{text:>{width}}" for text, width in columns), "planned", " ratio"])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n{header}")
    baselines: dict[str, float] = {}
    first, order = compose([*CASES["1b bf16"]]), f"deterministic={str(chosen.deterministic).lower()}"
    with process_groups(first.parallel, first.seed) as world:
        for name in chosen.cases or CASES:
            size, _, recipe = name.partition(" ")
            try:
                config = compose([*CASES[name], order])
                found = measure(partial(_step, config, world, recipe == MEGATRON), config, chosen.profile)
            except Exception:
                traceback.print_exc(limit=-4)
                continue
            finally:
                gc.collect()
            if recipe == "bf16":
                baselines[size] = found.step_ms
            print(row(name, found, baselines.get(size)), flush=True)


if __name__ == "__main__":
    main()
