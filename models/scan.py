"""The Mamba-2 state-space scan in plain torch, in chunks (SSD: arXiv 2405.21060, section 6)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def chunked_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int) -> Tensor:
    """y_t = C_t h_t with h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T, head by head."""
    batch, length, heads, head_dim = x.shape
    groups, state = B.shape[2:]
    pad = -length % chunk_size
    if pad:
        x, dt, B, C = (F.pad(t, (0, 0) * (t.dim() - 2) + (0, pad)) for t in (x, dt, B, C))
    chunks, per_group = (length + pad) // chunk_size, heads // groups
    x, dt, B, C = (t.unflatten(1, (chunks, chunk_size)) for t in (x, dt, B, C))
    decay = (dt * A).cumsum(2)
    values = (x * dt.unsqueeze(-1)).unflatten(3, (groups, per_group))
    B, C = B.movedim(2, 3), C.movedim(2, 3)
    cumulative = decay.movedim(2, 3)
    segment = cumulative.unsqueeze(-1) - cumulative.unsqueeze(-2)
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    L = segment.masked_fill(~causal, float("-inf")).exp().unflatten(2, (groups, per_group))
    scores = (C @ B.transpose(-1, -2)).unsqueeze(3) * L
    within = scores @ values.permute(0, 1, 3, 4, 2, 5)
    to_end = (decay[:, :, -1:] - decay).exp().unflatten(3, (groups, per_group)).unsqueeze(-1)
    states = (values * to_end).permute(0, 1, 3, 4, 5, 2).flatten(3, 4) @ B
    total = decay[:, :, -1].exp().repeat_interleave(head_dim, -1).unflatten(2, (groups, -1)).unsqueeze(-1)
    carried, carry = [], torch.zeros_like(states[:, 0])
    for index in range(chunks):
        carried.append(carry)
        carry = carry * total[:, index] + states[:, index]
    across = torch.stack(carried, 1) @ C.transpose(-1, -2)
    across = across.unflatten(3, (per_group, head_dim)).movedim(-1, -2) * decay.exp().movedim(2, 3).unflatten(
        2, (groups, per_group)
    ).unsqueeze(-1)
    return (within + across).flatten(2, 3).movedim(3, 2).flatten(1, 2)[:, :length]
