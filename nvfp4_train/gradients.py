"""Gradients of a step: where they start, their global norm, and where the first bad number came from. Megatron's
buffers hold the gradient of the loss summed over tokens; the update divides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

from models.hybrid import global_name
from nvfp4_train.distributed import gather_over
from nvfp4_train.precision.linear import STARTS_ITS_GRADIENT

Chunks = Sequence[torch.nn.Module]
# First element and the one after the last of the part of a flat parameter that a rank's optimizer updates.
Parts = Mapping[torch.nn.Parameter, tuple[int, int]]


def named_parameters(chunks: Chunks) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Global name and parameter of all that this rank holds, in the order of its chunks."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            yield global_name(chunk, name), parameter


def _gradient(parameter: Any) -> torch.Tensor:
    """The part of Megatron's FP32 gradient buffer that belongs to a parameter."""
    return parameter.main_grad


def start_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    """Before a step's first micro-batch: what Megatron's `zero_grad_buffer` does, in one pass over less memory.

    Weights whose first micro-batch writes over their gradient keep the old one until then.
    """
    zero = []
    for chunk in chunks:
        for parameter in chunk.params_with_grad:
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            if not getattr(parameter, STARTS_ITS_GRADIENT, False):
                zero.append(_gradient(parameter))
        for group in chunk.bucket_groups:
            group.reset()
    if zero:
        torch._foreach_zero_(zero)


def finish_gradients(chunks: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **settings: Any) -> None:
    """What Megatron's schedules call at the end: all sums over ranks. The division by tokens is left to the update."""
    finalize_model_grads(chunks, None, **settings)


class GradientNorm:
    """The Euclidean norm of all gradients of the whole model.

    Summed in FP64, parameter by parameter in the order of the whole model: splitting a parameter over ranks moves the
    sum by parts in 1e16, which rounding to FP32 hides (`outcome.of_mean`). FP64 can't overflow: FP32's largest square
    is 1e77.

    Args:
        chunks: what this rank holds of the model; its ranks agree on the order here.
        parts: with a distributed optimizer, which part of each parameter's gradient is complete here.
    """

    def __init__(self, chunks: Chunks, parts: Parts | None = None) -> None:
        self._parts = parts
        pipeline = parallel_state.get_pipeline_model_parallel_world_size()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        mine = [(number * pipeline + stage, list(_counted(chunk))) for number, chunk in enumerate(chunks)]
        self._model_ranks = parallel_state.get_model_parallel_group()
        stages = {number: names for held in gather_over(self._model_ranks, mine) for number, names in held}
        order = {name: place for place, name in enumerate(name for number in sorted(stages) for name in stages[number])}
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        counted = [pair for chunk in chunks for pair in _counted(chunk).items()]
        here = [(order[name], p) for name, p in counted if first or getattr(p, "tensor_model_parallel", False)]
        self._device = counted[0][1].device
        self._mine = [p for _, p in here]
        held = {place: number for number, (place, _) in enumerate(here)}
        sources = [held.get(place, len(held)) for place in range(len(order))]  # the last one is of none held here
        self._sources = torch.tensor(sources, dtype=torch.int64, device=self._device)

    def __call__(self) -> torch.Tensor:
        """Of what the buffers hold, FP64 [] on the device; inf or nan when one gradient is not finite."""
        norms = [torch.zeros((), dtype=torch.float64, device=self._device)]
        if self._mine:
            norms = [*torch._foreach_norm([self._complete(p) for p in self._mine], dtype=torch.float64), *norms]
        squares = torch.stack(norms).square()[self._sources]
        groups = [self._model_ranks]
        if self._parts is not None:
            groups.append(parallel_state.get_data_parallel_group(with_context_parallel=True))
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(squares, group=group)
        return squares.sum().sqrt()

    def _complete(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient = _gradient(parameter)
        if self._parts is None:
            return gradient
        start, end = self._parts.get(parameter, (0, 0))
        return gradient.view(-1)[start:end]


def _counted(chunk: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """By global name; a tied embedding counts once, on its first stage."""
    return {name: p for name, p in named_parameters([chunk]) if not getattr(p, "shared", False)}


def first_bad_gradient(chunks: Chunks) -> str | None:
    """Name of the parameter with a non-finite gradient that the backward pass reached first, None when all are finite.

    The pass runs from the last block to the first and carries a bad number along: the last such one is the source.
    """
    bad = [name for name, parameter in named_parameters(chunks) if not _is_finite(_gradient(parameter))]
    return bad[-1] if bad else None


def first_bad_weight(chunks: Chunks) -> str | None:
    """Name of the first parameter that holds a non-finite number, None when all are finite."""
    return next((name for name, parameter in named_parameters(chunks) if not _is_finite(parameter)), None)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def first_bad_output(chunks: Chunks, forward: Callable[[], Any]) -> str | None:
    """Name of the first module whose output is not finite when `forward` runs the model once more, or None."""
    found: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def check(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, (tuple, list)) else (output,)
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not _is_finite(tensor):
                    found.append(name)
                    return

        return check

    handles = [
        module.register_forward_hook(hook(global_name(chunk, name)))
        for chunk in chunks
        for name, module in chunk.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
