"""Megatron's distributed optimizer over torch's AdamW: moments, and the work of an update, are shared by replicas.

Megatron's class expects an optimizer that counts its steps once for a group of parameters (Apex's, Transformer
Engine's). torch's AdamW keeps a count with each parameter, and two methods don't hold for it as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer


class ShardedAdam(DistributedOptimizer):
    """DistributedOptimizer that loads what it saved when it runs torch's AdamW."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Megatron gives all parameters the same tensor as their count, which would advance once for each of them."""
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].detach().clone()

    def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        """The count is not among the tensors that are loaded for each parameter, and Megatron would ask for it."""
        group, place = self.model_param_group_index_map[model_param]
        shard = self.optimizer.param_groups[group]["params"][place]
        with torch.no_grad():
            for name, tensor in tensors.items():
                (shard if name == "param" else self.optimizer.state[shard][name]).copy_(tensor)


def sharded_parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The distributed optimizers inside Megatron's; none where each replica updates all of its parameters."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if isinstance(part, DistributedOptimizer)]


def mend(optimizer: MegatronOptimizer) -> None:
    """Give Megatron's distributed optimizers, which its factory makes, the methods of ShardedAdam."""
    for part in sharded_parts(optimizer):
        part.__class__ = ShardedAdam


def updated_here(optimizer: MegatronOptimizer) -> dict[torch.nn.Parameter, tuple[int, int]] | None:
    """First element and the one after the last of each flat parameter that this rank updates, None for all of all."""
    parts = sharded_parts(optimizer)
    if not parts:
        return None
    ranges = {
        parameter: part._get_model_param_range_map(parameter)["param"]
        for part in parts
        for parameter in part.model_param_gbuf_map
    }
    return {parameter: (found.start, found.end) for parameter, found in ranges.items()}
