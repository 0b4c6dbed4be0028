"""Trains a small model in one layout after another and writes what came of each. Started by `launches`.

python -m tests.parallel.worker RANK FOLDER

`FOLDER/jobs.json` maps the name of each job to the overrides of its configuration; a job whose model is split over
fewer ranks than there are is data parallel over the rest. Each rank writes `FOLDER/NAME.RANK.pt`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nvfp4_train import trainer
from nvfp4_train.compose import compose
from nvfp4_train.gradients import named_parameters
from nvfp4_train.layout import check_run


class Watched(trainer.Trainer):
    """A trainer that keeps its weights at the end where the worker finds them."""

    last: Watched

    def run(self, *args: Any) -> Any:
        Watched.last = self
        return super().run(*args)


def weights(chunks: Any) -> dict[str, Any]:
    """By global name: the rank's share, and where tensor-parallel ranks split it (dimension, sizes of the parts)."""
    split = parallel_state.get_tensor_model_parallel_world_size() > 1
    found = {}
    for name, parameter in named_parameters(chunks):
        cut = None
        if split and getattr(parameter, "tensor_model_parallel", False):
            dim = parameter.partition_dim
            cut = dim, getattr(parameter, "partition_sizes", [parameter.shape[dim]])
        found[name] = (parameter.detach().clone(), cut)
    return found


def run(overrides: list[str], world_size: int) -> dict[str, Any]:
    """What this rank holds after a run."""
    config = compose(overrides)
    check_run(config, world_size)
    code = trainer.train(config)
    state = Watched.last
    return {
        "code": int(code),
        "weights": weights(state.chunks),
        "histories": state.runtime.state_dict(),
        "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
    }


def main() -> None:
    """Join the other processes and do every job."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    jobs: dict[str, list[str]] = json.loads((folder / "jobs.json").read_text())
    size = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    trainer.Trainer = Watched  # type: ignore[misc]
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    for name, overrides in jobs.items():
        torch.save(run(overrides, size), folder / f"{name}.{rank}.pt")
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
