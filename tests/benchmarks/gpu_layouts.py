"""Layouts on two GPUs against one, in tokens a second. Run: python -m tests.benchmarks.gpu_layouts [RECIPE ...]

The 1b model on random tokens, the same global batch in every layout; medians of steps that begin and end with idle
GPUs. Starts torchrun once for one process and once for two, under NCCL where there are GPUs.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from data.quiet import quiet

with quiet():
    from nvfp4_train.compose import compose
    from nvfp4_train.distributed import process_groups
    from nvfp4_train.layout import check_run
    from tests.benchmarks.training_step import TrainingStep

STEPS, WARM_UP = 8, 4
RECIPES = ("bf16", "nvfp4")
BATCH = ("experiment=1b", "data.global_batch=16", "data.micro_batch=4")
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"one": ()},
    2: {
        "dp2": ("parallel=replicas",),
        "tp2 + sequence": ("parallel.tensor=2", "parallel.sequence=true"),
        "pp2": ("parallel.pipeline=2",),
        "cp2": ("parallel.context=2",),
    },
}


def measure(layout: str, recipe: str, processes: int) -> dict[str, float]:
    """Tokens a second, milliseconds a step and peak GiB of this rank."""
    config = compose([*BATCH, f"precision={recipe}", *LAYOUTS[processes][layout]])
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
    median = statistics.median(seconds)
    tokens = config.data.global_batch * config.data.sequence_length
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return {"tokens_per_s": tokens / median, "ms": 1e3 * median, "gib": peak}


def _wait() -> None:
    """Until all ranks are here with nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def work(results: Path, recipes: list[str]) -> None:
    """One process of a start: every layout of so many processes in turn; the first rank writes a line for each."""
    with quiet():
        from megatron.core import parallel_state
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    for recipe in recipes:
        for layout in LAYOUTS[dist.get_world_size()]:
            try:
                found = measure(layout, recipe, dist.get_world_size())
            except Exception:
                traceback.print_exc(limit=-4)
                continue
            finally:
                parallel_state.destroy_model_parallel()
                gc.collect()
            if dist.get_rank() == 0:
                with results.open("a") as file:
                    file.write(json.dumps({"layout": layout, "recipe": recipe, **found}) + "\n")
    dist.destroy_process_group()


def main(recipes: list[str]) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        results.touch()
        for processes in LAYOUTS:
            if torch.cuda.is_available() and torch.cuda.device_count() < processes:
                print(f"left out: layouts of {processes} GPUs, there are {torch.cuda.device_count()}")
                continue
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            subprocess.run([*command, "-m", __spec__.name, "--worker", str(results), *recipes], check=False)
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    alone = {line["recipe"]: line["tokens_per_s"] for line in lines if line["layout"] == "one"}
    print(f"{'layout':<16} {'recipe':<8} {'ms':>8} {'tokens/s':>9} {'of one':>6} {'GiB':>6}")
    for line in lines:
        ratio = f"{line['tokens_per_s'] / alone[line['recipe']]:6.3f}" if line["recipe"] in alone else ""
        print(
            f"{line['layout']:<16} {line['recipe']:<8} {line['ms']:8.1f} {line['tokens_per_s']:9.0f} {ratio:>6} "
            f"{line['gib']:6.1f}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), sys.argv[3:])
    else:
        main(sys.argv[1:] or list(RECIPES))
