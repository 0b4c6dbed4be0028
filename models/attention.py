"""Causal attention in plain torch: BF16 in and out, FP32 inside on a CPU, grouped queries, context parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup


class _GatherSequence(torch.autograd.Function):
    """All context ranks' pieces of a sequence, one behind another; gradients are summed back into the pieces."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, group: ProcessGroup) -> Tensor:
        """piece [s / ranks, ...] -> [s, ...]."""
        ctx.group = group
        whole = piece.new_empty((group.size() * piece.shape[0], *piece.shape[1:]))
        torch.distributed.all_gather_into_tensor(whole, piece.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """[s, ...] -> [s / ranks, ...]."""
        piece = gradient.new_empty((gradient.shape[0] // ctx.group.size(), *gradient.shape[1:]))
        torch.distributed.reduce_scatter_tensor(piece, gradient.contiguous(), group=ctx.group)
        return piece, None


def positions_of_rank(rank: int, ranks: int, local_length: int, device: torch.device) -> Tensor:
    """Positions in the sequence that a context rank holds: piece `rank` from the front and piece `rank` from the end.

    The work of causal attention grows along the sequence; this way every rank has the same share.
    """
    half = local_length // 2
    early = torch.arange(rank * half, (rank + 1) * half, device=device)
    late = torch.arange((2 * ranks - 1 - rank) * half, (2 * ranks - rank) * half, device=device)
    return torch.cat((early, late))


def _positions(ranks: int, local_length: int, device: torch.device) -> list[Tensor]:
    """The positions that each context rank holds."""
    if ranks == 1:
        return [torch.arange(local_length, device=device)]
    return [positions_of_rank(rank, ranks, local_length, device) for rank in range(ranks)]


class CausalAttention(MegatronModule):
    """softmax(Q K^T / sqrt(head size)) V over what came before, for Megatron's SelfAttention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal, f"{attn_mask_type} is not causal"
        assert pg_collection is not None, "attention needs its process groups"
        self.scale, self.cp_group = softmax_scale, pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [s, b, heads, size]; with context parallelism the rank's two pieces of the sequence.
            key, value: [s, b, groups, size].
            packed_seq_params: its `seq_idx` [b, s] numbers the documents of each whole row; tokens see their own alone.

        Returns:
            [s, b, heads * size] in the query's dtype.
        """
        assert attention_bias is None, "biased attention is not supported"
        documents = None if packed_seq_params is None else packed_seq_params.seq_idx
        mask, ranks = None, self.cp_group.size()
        if ranks > 1 or documents is not None:
            places = _positions(ranks, query.shape[0], query.device)
            mask = _visible(places[self.cp_group.rank()], torch.cat(places), documents)
        if ranks > 1:
            key, value = _GatherSequence.apply(key, self.cp_group), _GatherSequence.apply(value, self.cp_group)
        out = _attend(query, key, value, mask, self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def _visible(queries: Tensor, keys: Tensor, documents: Tensor | None) -> Tensor:
    """Which keys a query sees, by their positions in the row: [queries, keys], or [b, 1, queries, keys] by document."""
    causal = queries[:, None] >= keys[None, :]
    if documents is None:
        return causal
    same = documents[:, queries].unsqueeze(-1) == documents[:, keys].unsqueeze(-2)
    return (same & causal).unsqueeze(1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """[s, b, n, d] -> [b, n, s, d]. FP32 inside on a CPU, where BF16 products are slow and round more than once."""
    dtype = query.dtype
    query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    if query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    grouped = query.shape[1] != key.shape[1]
    if grouped and mask is not None:
        # Only CUDA's flash kernel takes grouped heads, and it takes no mask; the plain one would hold [b, n, s, s].
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
        grouped = False
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out.to(dtype)
