"""RMS norms: FP32 weights and arithmetic, BF16 out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

ACTIVATION_DTYPE = torch.bfloat16


def parameter_device(config: TransformerConfig) -> torch.device | None:
    """Where parameters are made: the current CUDA device, or torch's default (CPU, or meta inside its context)."""
    return None if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, for the residual stream. In: any float type; out: BF16."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=torch.float32, device=parameter_device(config)))
        # Megatron sums the gradients of weights that see only their rank's share of the tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., hidden_size]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(ACTIVATION_DTYPE)


class GroupRMSNorm(nn.Module):
    """RMS norm over consecutive groups of the last dimension, split over tensor-parallel ranks with its input."""

    def __init__(self, config: TransformerConfig, size: int, group_size: int, tp_group: torch.distributed.ProcessGroup):
        super().__init__()
        self.eps, self.group_size, self.tp_group = config.layernorm_epsilon, group_size, tp_group
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32, device=parameter_device(config)))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., groups * group_size], all groups of this tensor-parallel rank."""
        groups = x.float().unflatten(-1, (-1, self.group_size))
        return (F.rms_norm(groups, (self.group_size,), None, self.eps).flatten(-2) * self.weight).to(ACTIVATION_DTYPE)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weight as Megatron's distributed checkpoints keep it: cut along its only dimension."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
