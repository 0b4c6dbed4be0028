"""Causal attention: BF16 in and out, FP32 inside on a CPU, grouped queries, context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.config import ModelConfig, ModelError
from models.kernels import TOLERANCE, largest_error
from models.norm import ACTIVATION_DTYPE

# Queries [b, heads, s, size], keys and values [b, groups, s, size], scale of the scores -> [b, heads, s, size].
AttentionFunction = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


def torch_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """By the kernel that PyTorch takes."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """By cuDNN's kernel alone."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch_attention(query, key, value, scale)


@dataclass(frozen=True)
class AttentionKernel:
    """What attends where rows need no mask, and the line that says so."""

    function: AttentionFunction
    description: str


def choose_attention(config: ModelConfig, device: torch.device) -> AttentionKernel:
    """cuDNN's kernel on a CUDA device, where it takes the model's heads.

    PyTorch's own where `config.kernels` says torch, and where torch is to take only kernels that add in a fixed order:
    cuDNN's backward pass does not.
    """
    if config.kernels == "torch" or device.type != "cuda":
        return AttentionKernel(torch_attention, "attention: PyTorch")
    if torch.are_deterministic_algorithms_enabled():
        return AttentionKernel(torch_attention, "attention: PyTorch (cuDNN's kernel adds in no fixed order)")
    query, key, value = (t.permute(1, 2, 0, 3) for t in _random_heads(config, device))
    if can_use_cudnn_attention(SDPAParams(query, key, value, None, 0.0, True, query.shape[1] != key.shape[1])):
        return AttentionKernel(cudnn_attention, "attention: cuDNN; with a mask: PyTorch")
    return AttentionKernel(torch_attention, "attention: PyTorch (cuDNN's kernel does not take these heads here)")


def compare_attention(config: ModelConfig, chosen: AttentionKernel, device: torch.device) -> float:
    """Run a kernel and plain FP32 attention, forward and backward, on a small random input of the model's sizes.

    Returns:
        The largest relative error (2-norm) over the result and every gradient.

    Raises:
        ModelError: the error is beyond what BF16 explains, or not a number; or the kernel does not run.
    """
    heads = _random_heads(config, device)
    try:
        found = _with_gradients(chosen.function, heads)
    except RuntimeError as problem:
        said = f"{chosen.description}: it does not run here: {problem}. Write model.kernels=torch"
        raise ModelError(said) from problem
    expected = _with_gradients(_scores_in_memory, [t.detach().float().requires_grad_() for t in heads])
    worst, error = largest_error(found, expected)
    if not error <= TOLERANCE:
        raise ModelError(
            f"{chosen.description}: {worst} differs from plain attention by {error:.3g} (limit {TOLERANCE}), so "
            "training with this kernel would go wrong. Write model.kernels=torch"
        )
    return error


def _scores_in_memory(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """The definition, in the inputs' type."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch_attention(query, key, value, scale)


def _random_heads(config: ModelConfig, device: torch.device) -> list[Tensor]:
    """Query, key and value, [s, b, n, d] BF16, the same at every call; s is a multiple of no tile."""
    generator = torch.Generator().manual_seed(0)
    counts = (config.num_attention_heads, config.num_query_groups, config.num_query_groups)
    shapes = [(2 * 128 + 3, 2, count, config.head_dim) for count in counts]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [t.to(device, ACTIVATION_DTYPE).requires_grad_() for t in drawn]


def _with_gradients(function: AttentionFunction, heads: list[Tensor]) -> dict[str, Tensor]:
    """Result and gradients in FP32, the result weighted by numbers that repeat at every call."""
    query, key, value = (t.permute(1, 2, 0, 3) for t in heads)
    out = function(query, key, value, None)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    found = (out.detach(), *torch.autograd.grad(out, heads, weights))
    names = ("the output", *(f"the gradient of the {name}" for name in ("query", "key", "value")))
    return {name: each.float() for name, each in zip(names, found, strict=True)}


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
        kernel: AttentionKernel,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal, f"{attn_mask_type} is not causal"
        assert pg_collection is not None, "attention needs its process groups"
        self.scale, self.cp_group, self.kernel = softmax_scale, pg_collection.cp, kernel

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
        out = _attend(query, key, value, mask, self.scale, self.kernel.function)
        return out.permute(2, 0, 1, 3).flatten(2)


def _visible(queries: Tensor, keys: Tensor, documents: Tensor | None) -> Tensor:
    """Which keys a query sees, by their positions in the row: [queries, keys], or [b, 1, queries, keys] by document."""
    causal = queries[:, None] >= keys[None, :]
    if documents is None:
        return causal
    same = documents[:, queries].unsqueeze(-1) == documents[:, keys].unsqueeze(-2)
    return (same & causal).unsqueeze(1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, unmasked: AttentionFunction
) -> Tensor:
    """[s, b, n, d] -> [b, n, s, d]. FP32 inside on a CPU, where BF16 products are slow and round more than once."""
    dtype = query.dtype
    query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    if query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    if mask is None:
        return unmasked(query, key, value, scale).to(dtype)
    # The kernels that take grouped heads take no mask; the plain one would hold [b, n, s, s].
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).to(dtype)
