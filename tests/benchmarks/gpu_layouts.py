"""Layouts on two GPUs against one, in tokens a second.

python -m tests.benchmarks.gpu_layouts [RECIPE ...] [OVERRIDE ...]

The 1b model on random tokens; medians of steps that begin and end with idle GPUs; the largest peak of a rank. Layouts
share the batch of one GPU: 16 sequences, so that each replica has half of them beside a whole update, and a pipeline of
two idles (2 - 1) / (4 + 2 - 1) of its time; `dp2, batch doubled` has as many a GPU as one alone. Under NCCL where there
are GPUs. One start measures all layouts of so many processes; after one that fails another start goes on behind it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data.quiet import quiet

with quiet():
    from nvfp4_train.compose import compose, replaced
    from nvfp4_train.distributed import gather, process_groups
    from nvfp4_train.layout import check_run
    from tests.benchmarks.training_step import TrainingStep

STEPS, WARM_UP = 8, 4
HANGS = timedelta(minutes=3)  # in a collective, after which a layout has failed
RECIPES = ("bf16", "nvfp4")
BATCH = ("experiment=1b", "data.global_batch=16", "data.micro_batch=4")
REPLICAS, DOUBLED = "parallel=replicas", "dp2, batch doubled"
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"one": ()},
    2: {
        "dp2": (REPLICAS,),
        "dp2, no overlap": (),
        DOUBLED: (REPLICAS,),
        "tp2 + sequence": ("parallel.tensor=2", "parallel.sequence=true"),
        "pp2": ("parallel.pipeline=2",),
        "cp2": ("parallel.context=2",),
    },
}
Job = tuple[str, str]  # recipe and layout
Found = dict[Job, dict[str, float]]


def measure(recipe: str, layout: str, overrides: Sequence[str], processes: int) -> dict[str, float]:
    """Tokens a second, milliseconds a step and the largest peak of a rank in GiB."""
    config = compose([*BATCH, *overrides, f"precision={recipe}", *LAYOUTS[processes][layout]])
    if layout == DOUBLED:
        config = replaced(config, {"data.global_batch": 2 * config.data.global_batch})
    check_run(config, processes)
    cuda = torch.cuda.is_available()
    with process_groups(config.parallel, config.seed) as world:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        step = TrainingStep(config, world, warm_up=WARM_UP)
        seconds = []
        for _ in range(STEPS):
            _wait()
            start = time.perf_counter()
            step()
            _wait()
            seconds.append(time.perf_counter() - start)
        peak = max(gather(torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0, world))
    median = statistics.median(seconds)
    tokens = config.data.global_batch * config.data.sequence_length
    return {"tokens_per_s": tokens / median, "ms": 1e3 * median, "gib": peak}


def _wait() -> None:
    """Until all ranks are here with nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def work(results: Path, overrides: Sequence[str]) -> None:
    """One process of a start: one job after the other, each a line of `results`."""
    with quiet():
        from megatron.core import parallel_state
    backend, device = "gloo", None
    if torch.cuda.is_available():
        backend, device = "nccl", torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device, timeout=HANGS)
    for recipe, layout in json.loads(os.environ["JOBS"]):
        found = measure(recipe, layout, overrides, dist.get_world_size())
        parallel_state.destroy_model_parallel()
        gc.collect()
        if dist.get_rank() == 0:
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


def measured(jobs: Sequence[Job], overrides: Sequence[str], processes: int) -> Found:
    """What came of each job, without those that failed."""
    found: Found = {}
    left = list(jobs)
    with tempfile.TemporaryDirectory() as folder:
        while left:
            results = Path(folder) / f"{len(left)}.jsonl"
            results.touch()
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            environment = {**os.environ, "JOBS": json.dumps(left)}
            subprocess.run(
                [*command, "-m", __spec__.name, "--worker", str(results), *overrides], env=environment, check=False
            )
            lines: list[Any] = [json.loads(line) for line in results.read_text().splitlines()]
            found |= dict(zip(left, lines, strict=False))
            for recipe, layout in left[len(lines) : len(lines) + 1]:
                print(f"failed: {layout} in {recipe}, see above", flush=True)
            left = left[len(lines) + 1 :]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="RECIPE|OVERRIDE", help=f"by default {', '.join(RECIPES)}")
    words = parser.parse_args(arguments).words
    overrides = [word for word in words if "=" in word]
    recipes = [word for word in words if "=" not in word] or RECIPES
    found: Found = {}
    for processes, layouts in LAYOUTS.items():
        if torch.cuda.is_available() and torch.cuda.device_count() < processes:
            print(f"left out: layouts of {processes} GPUs, there are {torch.cuda.device_count()}")
            continue
        found |= measured([(recipe, layout) for recipe in recipes for layout in layouts], overrides, processes)
    print(f"{'layout':<18} {'recipe':<9} {'ms':>8} {'tokens/s':>9} {'of one':>6} {'GiB':>6}")
    for (recipe, layout), line in found.items():
        alone = found.get((recipe, "one"))
        ratio = f"{line['tokens_per_s'] / alone['tokens_per_s']:6.3f}" if alone else ""
        print(f"{layout:<18} {recipe:<9} {line['ms']:8.1f} {line['tokens_per_s']:9.0f} {ratio:>6} {line['gib']:6.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
