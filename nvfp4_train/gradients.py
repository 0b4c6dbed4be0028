"""Gradients between backward and update: their global norm, clipping, and where the first bad number came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel


def named_gradients(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Name and FP32 gradient buffer of every parameter, in the order of the model."""
    return [(name, _gradient(parameter)) for name, parameter in model.named_parameters()]


def _gradient(parameter: Any) -> torch.Tensor:
    """The part of Megatron's gradient buffer that belongs to a parameter."""
    return parameter.main_grad


def gradient_norm(model: torch.nn.Module) -> float:
    """Euclidean norm over all parameters of the whole model; inf or nan when one gradient is not finite.

    Summed in FP64, parameter by parameter in the order of the model, then rounded to FP32: splitting a parameter over
    ranks moves the sum by parts in 1e16, which the rounding hides. FP64 can't overflow: FP32's largest square is 1e77.
    """
    squares = [
        torch.linalg.vector_norm(_gradient(parameter), dtype=torch.float64).square()
        for parameter in model.parameters()
        if _is_counted_here(parameter)
    ]
    total = torch.stack(squares).sum()
    group = parallel_state.get_model_parallel_group()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return float(total.sqrt().to(torch.float32).item())


def _is_counted_here(parameter: torch.nn.Parameter) -> bool:
    """What tensor-parallel ranks hold in copies counts on the first of them alone; a tied embedding counts once."""
    if getattr(parameter, "shared", False):
        return False
    split = getattr(parameter, "tensor_model_parallel", False)
    return split or parallel_state.get_tensor_model_parallel_rank() == 0


def clip_gradients(model: DistributedDataParallel, norm: float, limit: float) -> None:
    """Scale all gradients by limit / norm where norm > limit; a limit of 0 clips nothing."""
    if 0 < limit < norm:
        model.scale_gradients(limit / norm)


def first_bad_gradient(model: torch.nn.Module) -> str | None:
    """Name of the parameter with a non-finite gradient that the backward pass reached first, None when all are finite.

    The pass runs from the last block to the first and carries a bad number along: the last such one is the source.
    """
    bad = [name for name, gradient in named_gradients(model) if not bool(torch.isfinite(gradient).all())]
    return bad[-1] if bad else None


def first_bad_weight(model: torch.nn.Module) -> str | None:
    """Name of the first parameter that holds a non-finite number, None when all are finite."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return name
    return None


def first_bad_output(model: torch.nn.Module, forward: Callable[[], Any]) -> str | None:
    """Name of the first module whose output is not finite when `forward` runs the model once more, or None."""
    found: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def check(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, (tuple, list)) else (output,)
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    found.append(name)
                    return

        return check

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
