"""RMS norms: FP32 weights and arithmetic, BF16 out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

ACTIVATION_DTYPE = torch.bfloat16
NormFunction = Callable[[Tensor, Tensor, float, int], Tensor]
BlockNormFunction = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def parameter_device(config: TransformerConfig) -> torch.device | None:
    """Where parameters are made: the current CUDA device, or torch's default (CPU, or meta inside its context)."""
    return None if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())


def rms_norm(x: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
    """x / rms(x) * weight over consecutive groups of the last dimension.

    Args:
        x: [..., n], any float type.
        weight: [n], FP32.
        group_size: a divisor of n; n for one norm over all of it.

    Returns:
        [..., n], BF16; FP32 inside.
    """
    if group_size == x.shape[-1]:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(ACTIVATION_DTYPE)
    groups = x.float().unflatten(-1, (-1, group_size))
    return (F.rms_norm(groups, (group_size,), None, eps).flatten(-2) * weight).to(ACTIVATION_DTYPE)


def block_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What a block starts with: `rms_norm` of x [..., n] over the last dimension, and x for the residual stream.

    A kernel that is told both adds their gradients while it has them at hand.
    """
    return rms_norm(x, weight, eps, x.shape[-1]), x


class RMSNorm(nn.Module):
    """The norm of the residual stream, over the last dimension. In: BF16; out: BF16.

    `function` computes it: `rms_norm`, or a kernel of the same meaning.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, function: NormFunction = rms_norm
    ) -> None:
        super().__init__()
        self.eps, self.function = eps, function
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=torch.float32, device=parameter_device(config)))
        # Megatron sums the gradients of weights that see only their rank's share of the tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., hidden_size]."""
        return self.function(x, self.weight, self.eps, x.shape[-1])


class BlockNorm(RMSNorm):
    """The norm at the start of a block, in the form in which Megatron's layers take the residual stream beside it."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, function: BlockNormFunction
    ) -> None:
        super().__init__(config, hidden_size, eps)
        self.both = function

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[..., hidden_size] -> normalized, and as it is."""
        return self.both(x, self.weight, self.eps)


class GroupRMSNorm(nn.Module):
    """RMS norm over consecutive groups of the last dimension, split over tensor-parallel ranks with its input."""

    def __init__(
        self,
        config: TransformerConfig,
        size: int,
        group_size: int,
        tp_group: torch.distributed.ProcessGroup,
        *,
        function: NormFunction = rms_norm,
    ) -> None:
        super().__init__()
        self.eps, self.group_size = config.layernorm_epsilon, group_size
        self.tp_group, self.function = tp_group, function
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32, device=parameter_device(config)))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., groups * group_size], all groups of this tensor-parallel rank."""
        return self.function(x, self.weight, self.eps, self.group_size)

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
