"""Trains a small model in one layout after another and writes what came of each. Started by `launches`.

python -m tests.parallel.worker FOLDER GPUS

`FOLDER/jobs.json` maps a number of processes to the jobs that so many do, and the name of each job to the overrides of
its configuration; a job whose model is split over fewer ranks than there are is data parallel over the rest. Each rank
writes `FOLDER/NAME.RANK.pt`, and a log. On a CPU the ranks do all jobs one after the other; with GPUs see `processes`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nvfp4_train import trainer
from nvfp4_train.batches import StepBatch, step_batches
from nvfp4_train.compose import compose
from nvfp4_train.gradients import named_parameters
from nvfp4_train.layout import check_run
from nvfp4_train.precision.three_gemms import Factor, ThreeGemms
from tests.parallel.processes import Run, do_each, fork, log_to

OBSERVED = "decoder.layers.3.mlp.linear_fc1"


class Watched(trainer.Trainer):
    """A trainer that can be looked at; `found` is what it leaves."""

    found: dict[str, Any]

    def run(self, *args: Any) -> Any:
        code = super().run(*args)
        Watched.found |= {
            "code": int(code),
            "weights": shares(self.chunks, lambda parameter: parameter),
            "histories": self.runtime.state_dict(),
            "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
            "context_rank": parallel_state.get_context_parallel_rank(),
        }
        return code

    def _update(self, factor: Any, lr: float) -> None:
        if self.step == self.folder.step:
            Watched.found["gradients"] = shares(self.chunks, lambda parameter: parameter.main_grad * factor)
        super()._update(factor, lr)


def uneven_batches(*arguments: Any) -> Iterator[StepBatch]:
    """Those of the run, with very different numbers of valid tokens in each sample."""
    for step in step_batches(*arguments):
        for batch in step.micro_batches:
            place = torch.arange(batch["tokens"].shape[1])
            batch["loss_mask"] = (place < batch["tokens"].sum(1, keepdim=True) % len(place)).float()
        yield step


class Recorder:
    """What the first step's operands were scaled by, and one operand with random bits in full.

    Attributes:
        scales: `microbatch linear gemm kind` -> tensor scale; weights, which micro-batches share, without the first.
        values: of the gradient of OBSERVED in its dgrad, decoded, in micro-batch 0.
    """

    def __init__(self) -> None:
        self.scales: dict[str, torch.Tensor] = {}
        self.values: torch.Tensor | None = None

    def __enter__(self) -> Recorder:
        self._real = ThreeGemms._quantize

        def recording(gemms: ThreeGemms, x: Any, gemm: str, kind: str, axis: int, call: Any) -> Factor:
            factor = self._real(gemms, x, gemm, kind, axis, call)
            if call.step == 0 and factor.scale is not None:
                words = (gemms.name, gemm, kind) if kind == "weight" else (str(call.microbatch), gemms.name, gemm, kind)
                self.scales[" ".join(words)] = factor.scale.to("cpu", copy=True)
                if (gemms.name, gemm, kind, call.microbatch) == (OBSERVED, "dgrad", "gradient", 0):
                    self.values = factor.decoded()
            return factor

        ThreeGemms._quantize = recording  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        ThreeGemms._quantize = self._real  # type: ignore[method-assign]


def shares(chunks: Any, value: Callable[[Any], torch.Tensor]) -> dict[str, Any]:
    """By global name: a tensor of each parameter, and where tensor-parallel ranks split it (dimension, part sizes)."""
    split = parallel_state.get_tensor_model_parallel_world_size() > 1
    found = {}
    for name, parameter in named_parameters(chunks):
        cut = None
        if split and getattr(parameter, "tensor_model_parallel", False):
            dim = parameter.partition_dim
            cut = dim, getattr(parameter, "partition_sizes", [parameter.shape[dim]])
        found[name] = (value(parameter).detach().to("cpu", copy=True), cut)
    return found


def run(overrides: list[str], world_size: int) -> dict[str, Any]:
    """What this rank holds after a run."""
    trainer.Trainer, trainer.step_batches = Watched, uneven_batches  # type: ignore[misc]
    config = compose(overrides)
    check_run(config, world_size)
    Watched.found = {}
    with Recorder() as recorder:
        trainer.train(config)
    return {**Watched.found, "scales": recorder.scales, "values": recorder.values}


def main(run: Run) -> None:
    """Do all jobs, `run` with the overrides of each and the number of processes: forks of this one, which has imported
    everything and started nothing.
    """
    folder, gpus = Path(sys.argv[1]), int(sys.argv[2])
    all_jobs = json.loads((folder / "jobs.json").read_text())
    if gpus:
        failed = [name for size, jobs in all_jobs.items() for name in do_each(run, folder, jobs, int(size), gpus)]
        sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
    for size, jobs in all_jobs.items():
        ranks = {fork(partial(do_all, run, folder, rank, int(size), jobs)) for rank in range(int(size))}
        while ranks:
            process, status = os.wait()
            ranks.remove(process)
            if status:
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                sys.exit(f"one of {size} processes ended with {os.waitstatus_to_exitcode(status)}")


def do_all(run: Run, folder: Path, rank: int, size: int, jobs: dict[str, list[str]]) -> None:
    """Join the other processes and do every job."""
    log_to(folder / f"log{size}.{rank}")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    for name, overrides in jobs.items():
        torch.save(run(overrides, size), folder / f"{name}.{rank}.pt")
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(run)
