"""Runs the small model under every layout of two processes and writes what it found. Started by test_layouts.

python -m tests.models.layout_worker RANK FOLDER
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor

from models.attention import positions_of_rank
from models.hybrid import build_model, initial_names, named_linears
from models.megatron_cpu import install_cpu_rng, megatron_device
from tests.models.conftest import TINY
from tests.models.plain_linears import PLAIN

LENGTH = 32
CONFIG = replace(TINY, pattern="M-|*M", mamba_num_groups=4)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2},
}
TIED = replace(CONFIG, tie_embeddings=True)


def make_tokens() -> Tensor:
    """[2, 33] token ids."""
    return torch.randint(0, CONFIG.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(4))


def make_documents() -> Tensor:
    """[2, 32] numbers of documents: borders within, at and across what two context ranks hold."""
    return torch.stack([torch.arange(LENGTH) // 5, (torch.arange(LENGTH) >= LENGTH // 2).long()]).int()


def train_pass(
    model: Any, tokens: Tensor, rank: int, context: int, pipeline: int, documents: Tensor | None = None
) -> Tensor | None:
    """Loss [2, tokens of the rank] of the last stage after a backward pass of its sum, None on other stages."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    if context > 1:
        mine = positions_of_rank(rank, context, LENGTH // context, torch.device("cpu"))
        inputs, labels = inputs[:, mine], labels[:, mine]
    if pipeline == 1:
        loss = model(inputs.contiguous(), labels=labels.contiguous(), documents=documents)
        loss.sum().backward()
        return loss.detach()
    if rank == 0:
        hidden = model(inputs.contiguous())
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
        return None
    hidden = torch.empty(LENGTH, 2, CONFIG.hidden_size, dtype=torch.bfloat16)
    dist.recv(hidden, 0)
    model.set_input_tensor(hidden.requires_grad_())
    loss = model(inputs.contiguous(), labels=labels.contiguous())
    loss.sum().backward()
    dist.send(hidden.grad, 0)
    return loss.detach()


def run(rank: int, config: Any, layout: dict[str, Any], documents: Tensor | None = None) -> dict[str, Any]:
    """Weights, loss and gradients of this rank."""
    tensor, pipeline, context = (layout.get(name, 1) for name in ("tensor", "pipeline", "context"))
    parallel_state.initialize_model_parallel(tensor, pipeline, context_parallel_size=context)
    install_cpu_rng()
    with megatron_device():
        megatron_random.model_parallel_cuda_manual_seed(1)
    model = build_model(config, PLAIN, sequence_length=LENGTH, seed=1, **layout)
    with megatron_device():
        loss = train_pass(model, make_tokens(), rank, context, pipeline, documents)
    gradients = {}
    for name, parameter in initial_names(model):
        if context > 1 or (layout.get("sequence") and not getattr(parameter, "tensor_model_parallel", False)):
            dist.all_reduce(parameter.grad)  # what Megatron's gradient reduction does for these
        gradients[name] = parameter.grad
    marks = {
        name: (getattr(p, "partition_dim", -1), getattr(p, "partition_sizes", None))
        for name, p in initial_names(model)
        if getattr(p, "tensor_model_parallel", False)
    }
    weights = {name: parameter.detach() for name, parameter in initial_names(model)}
    linears = {name: (linear.input_size, linear.output_size) for name, linear in named_linears(model).items()}
    parallel_state.destroy_model_parallel()
    return {"loss": loss, "weights": weights, "gradients": gradients, "marks": marks, "linears": linears}


def main() -> None:
    """Join the other process and run every layout."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    found = {}
    for name, layout in LAYOUTS.items():
        found[name] = run(rank, CONFIG, layout)
    found["tied pipeline"] = run(rank, TIED, LAYOUTS["pipeline"])
    found["context documents"] = run(rank, CONFIG, LAYOUTS["context"], make_documents())
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
