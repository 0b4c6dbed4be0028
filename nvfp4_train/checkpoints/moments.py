"""Adam's moments as tensors of a checkpoint: the same names and places in the whole model, whatever holds them.

Replicas that share the optimizer's work hold a flat range of a parameter each, which is no rectangle. It is written as
the few rectangles that it is made of, by the rank that holds it and without gathering; any layout can read them, each
rank the part that it wants, straight into the optimizer's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer.optimizer import MegatronOptimizer

from nvfp4_train.optimizer import inner_optimizers, sharded_parts, updated_here

MOMENTS = ("exp_avg", "exp_avg_sq")


class _Held(NamedTuple):
    """The state of a parameter's elements `start` to `stop`, counted flat; `shared`: replicas hold the others."""

    state: Mapping[str, torch.Tensor]
    start: int
    stop: int
    shared: bool


def sharded_moments(optimizer: MegatronOptimizer, model: dict[str, Any]) -> dict[str, dict[str, list[ShardedTensor]]]:
    """This rank's moments, as Megatron's sharded tensors over the optimizer's own memory: saving reads, loading fills.

    Args:
        model: the sharded state of this rank's chunks, over the parameters themselves.

    Returns:
        Moment -> parameter's name in the file -> pieces.
    """
    held = _held(optimizer)
    pieces: dict[str, dict[str, list[ShardedTensor]]] = {moment: {} for moment in MOMENTS}
    for entry in nested_values(model):
        if id(entry.data) in held:
            for moment in MOMENTS:
                pieces[moment].setdefault(entry.key, []).extend(_pieces(entry, moment, held[id(entry.data)]))
    return pieces


def steps_taken(optimizer: MegatronOptimizer) -> torch.Tensor:
    """Adam's count of its steps, the same for all parameters. Shape: scalar, float32 on the CPU."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                return torch.tensor(float(inner.state[parameter]["step"]))
    return torch.tensor(0.0)


def set_steps_taken(optimizer: MegatronOptimizer, count: torch.Tensor) -> None:
    """Put Adam's count of its steps where `steps_taken` finds it."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter]["step"].fill_(float(count))


def _held(optimizer: MegatronOptimizer) -> dict[int, _Held]:
    """What of each parameter's state this rank holds, by the parameter's identity."""
    ranges = updated_here(optimizer)
    if ranges is None:
        states = [item for inner in inner_optimizers(optimizer) for item in inner.state.items()]
        return {id(parameter): _Held(state, 0, parameter.numel(), False) for parameter, state in states}
    held = {}
    for part in sharded_parts(optimizer):
        for parameter in part.model_param_gbuf_map:
            group, place = part.model_param_group_index_map[parameter]
            shard = part.optimizer.param_groups[group]["params"][place]
            held[id(parameter)] = _Held(part.optimizer.state[shard], *ranges[parameter], True)
    return held


def _pieces(entry: ShardedTensor | ShardedTensorFactory, moment: str, held: _Held) -> Iterator[ShardedTensor]:
    """The pieces of one moment of one parameter. A factory cuts the parameter into tensors that are split apart."""
    parameter, flat = entry.data, held.state[moment].view(-1)
    tensors = [entry] if isinstance(entry, ShardedTensor) else nested_values(entry.build())
    for tensor in tensors:
        assert tensor.data.is_contiguous(), tensor.key
        assert tensor.prepend_axis_num == 0, tensor.key
        first = (tensor.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
        start, stop = max(held.start, first), min(held.stop, first + tensor.data.numel())
        named = replace(tensor, key=f"optimizer.state.{moment}.{tensor.key}", data=None, dtype=flat.dtype)
        if held.shared:  # replicas write different pieces: each is the first to hold its own
            named = replace(named, replica_id=(*tensor.replica_id[:-1], 0), axis_fragmentations=None)
        for offset, shape in rectangles(tensor.local_shape, start - first, stop - first):
            size, begin = prod(shape), start - held.start
            place = tuple(map(sum, zip(tensor.global_offset, offset, strict=True)))
            data = flat[begin : begin + size].view(shape)
            yield replace(named, data=data, local_shape=shape, global_offset=place)
            start += size


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offset and shape, in order, of the rectangles that elements `start` to `stop` of a row-major tensor make."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = prod(shape[1:])
    head = min(stop, -(-start // row) * row)  # end of an incomplete first row
    tail = max(head, stop // row * row)  # begin of an incomplete last one
    yield from _within_row(shape, row, start, head)
    if head < tail:
        yield (head // row, *(0 for _ in shape[1:])), ((tail - head) // row, *shape[1:])
    yield from _within_row(shape, row, tail, stop)


def _within_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    index = start // row
    for offset, size in rectangles(shape[1:], start - index * row, stop - index * row):
        yield (index, *offset), (1, *size)
