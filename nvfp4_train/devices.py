"""A GPU that is there and can't be used, or that is too small: said before the model is built, with what mends it.
And whether its kernels add in one fixed order.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.layout import model_ranks
from nvfp4_train.memory import Machine, memory
from nvfp4_train.precision.assignment import LinearPrecision

_GIB = 2**30


def check_cuda() -> None:
    """Refuses to train on the CPU of a machine with a GPU that torch, built for CUDA, can't use.

    Raises:
        ConfigError: with torch's own words. CUDA_VISIBLE_DEVICES= (empty) says that the CPU is meant.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda is None or hidden or torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return
    try:
        torch.cuda.init()
        cause = "no device found"
    except Exception as error:  # RuntimeError or an assertion, by what is missing
        cause = (str(error).splitlines() or [type(error).__name__])[0]
    raise ConfigError(
        f"A GPU driver is there, but torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no device: "
        f"{cause}. A driver older than CUDA {torch.version.cuda} is the usual cause: update it, or install a torch "
        "built for it. To train on the CPU, set CUDA_VISIBLE_DEVICES= (empty). python -m nvfp4_train.doctor says more."
    )


def fix_order_of_sums(deterministic: bool, device: torch.device) -> str:
    """Lets torch, cuBLAS and mamba-ssm use only kernels that give the same bits every time, or any.

    Returns:
        The line that says so; empty on a CPU, where nothing needs to be chosen.
    """
    if device.type != "cuda":
        return ""
    torch.use_deterministic_algorithms(deterministic)
    # Filling new tensors with NaN first would cost a pass over each and change no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    with suppress(ModuleNotFoundError):  # `models.kernels` says what runs instead, or refuses
        importlib.import_module("mamba_ssm.utils.determinism").set_deterministic_mode(deterministic)
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch asks for it by this name before it allows cuBLAS
        return "sums in one fixed order: a repeated or resumed run has the same bits (deterministic=true)"
    return "sums in any order: a repeated or resumed run differs in its last bits (deterministic=false)"


def check_memory(config: RunConfig, linears: Sequence[LinearPrecision], backend: str, device: torch.device) -> None:
    """Refuses a run that a GPU can't hold, where each holds the whole model and all of its optimizer's state.

    Args:
        linears: what the recipe decided.
        backend: who multiplies.

    Raises:
        ConfigError: the estimate of `python -m nvfp4_train.plan`, and the overrides that fit.
    """
    if device.type != "cuda" or model_ranks(config.parallel) > 1 or config.parallel.distributed_optimizer:
        return
    properties = torch.cuda.get_device_properties(device)
    problem = memory_problem(config, linears, backend, properties.total_memory, properties.name)
    if problem is not None:
        raise ConfigError(problem)


def memory_problem(
    config: RunConfig, linears: Sequence[LinearPrecision], backend: str, capacity: int, card: str
) -> str | None:
    """Why `capacity` bytes of a card are too few for a run, and the overrides that fit; None where they suffice."""
    kernels = "torch" if config.model.kernels == "torch" else "mamba_ssm"
    machine = Machine(cuda=True, kernels=kernels, native=backend == "native")

    def needed(run: RunConfig) -> int:
        return memory(run.model, linears, run.data.micro_batch * run.data.sequence_length, machine).total

    total = needed(config)
    if total <= capacity:
        return None
    fitting = [f"{words} ({needed(run) / _GIB:.0f} GiB)" for words, run in _smaller(config) if needed(run) <= capacity]
    instead = f"These fit: {', or '.join(fitting)}." if fitting else "Not even one sequence with full recompute fits."
    parts = memory(config.model, linears, 1, machine)
    states, data = parts.weights + parts.gradients + parts.moments, config.data
    return (
        f"{config.name} needs about {total / _GIB:.0f} GiB on one GPU ({states / _GIB:.0f} GiB of weights, gradients "
        f"and moments; data.micro_batch={data.micro_batch}, model.recompute={config.model.recompute}), "
        f"and {card} has {capacity / _GIB:.0f} GiB. {instead} python -m nvfp4_train.plan shows the parts; a model that "
        "is too large for one GPU is split with parallel.tensor or parallel.pipeline."
    )


def _smaller(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Runs with the same numbers that need less memory, by what is to be written; the fastest first."""
    order = ("none", "selective", "full")
    modes = order[order.index(config.model.recompute) + 1 :]
    for mode in modes:
        yield f"model.recompute={mode}", replace(config, model=replace(config.model, recompute=mode))
    micro = config.data.micro_batch
    for size in (divisor for divisor in range(micro - 1, 0, -1) if micro % divisor == 0):
        yield f"data.micro_batch={size}", replace(config, data=replace(config.data, micro_batch=size))
    if modes and micro > 1:
        smallest = replace(config.data, micro_batch=1)
        run = replace(config, data=smallest, model=replace(config.model, recompute="full"))
        yield "data.micro_batch=1 model.recompute=full", run
