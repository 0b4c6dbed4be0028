"""The Mamba-2 state-space scan in plain torch, in chunks (SSD: arXiv 2405.21060, section 6).

Head by head, with a state h of [head size, state size] that starts at zero:

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T
    y_t = h_t C_t + D x_t

Inside a chunk of q tokens this is a masked matrix product, y_i = sum over j <= i of (C_i . B_j) exp(s_i - s_j) dt_j x_j
with s the running sum of dt A; between chunks only the state is carried. Logarithms are summed inside a chunk,
subtracted and masked before the exponential: a difference s_i - s_j with j <= i is never positive, so nothing overflows
however long the sequence or strong the decay.

The gradient is written by hand: it keeps the inputs, the result and one state a chunk, and builds the decay matrices
[q, q] of each head again. Time is the last dimension inside a chunk, so that the heads of a group, which share B and C,
meet them in one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunked_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    chunk_size: int,
    documents: Tensor | None = None,
) -> Tensor:
    """Scan every head over time.

    Args:
        x: [s, b, heads, head size], FP32 or FP64 as everything else.
        dt: [s, b, heads], positive.
        A: [heads], negative.
        B, C: [s, b, groups, state size]; consecutive heads share a group.
        D: [heads].
        chunk_size: tokens a chunk; the result does not depend on it. A last, shorter chunk is padded with dt = 0.
        documents: [b, s], the number of each token's document in its row, never falling: the state starts at zero at
            the first token of each. None: one document a row.

    Returns:
        y: [s, b, heads, head size].
    """
    length = x.shape[0]
    padding = -length % chunk_size
    if padding:
        x, dt, B, C = (F.pad(t, (0, 0) * (t.dim() - 1) + (0, padding)) for t in (x, dt, B, C))
        documents = None if documents is None else F.pad(documents, (0, padding), value=-1)
    return _Scan.apply(x, dt, A, B, C, D, chunk_size, documents)[:length]


def _to_chunks(t: Tensor, chunk_size: int) -> Tensor:
    """[s, b, groups, ...] -> [b * chunks * groups, ..., q], contiguous."""
    t = t.unflatten(0, (-1, chunk_size)).movedim(1, -1)
    return t.movedim(0, 1).contiguous().flatten(0, 2)


def _from_chunks(t: Tensor, batch: int, groups: int) -> Tensor:
    """[b * chunks * groups, ..., q] -> [s, b, groups, ...]."""
    t = t.unflatten(0, (batch, -1, groups)).movedim(0, 1)
    return t.movedim(-1, 1).flatten(0, 1)


@dataclass
class _Borders:
    """Where documents end, for the scan in chunks: n and q as in `_Chunks`.

    Attributes:
        apart: [n, 1, q, q], whether tokens i and j are of different documents.
        reads: [n, 1, q], 1 where a token's document is the one whose state enters the chunk.
        leaves: [n, 1, q], 1 where a token's document is the one whose state leaves it.
    """

    apart: Tensor
    reads: Tensor
    leaves: Tensor

    @classmethod
    def cut(cls, documents: Tensor, chunk_size: int, groups: int, dtype: torch.dtype) -> _Borders:
        """From [b, s] numbers of documents, s a multiple of the chunk."""
        chunks = documents.unflatten(1, (-1, chunk_size))
        before = torch.cat((chunks[:, :1, :1], chunks[:, :-1, -1:]), dim=1)  # the first chunk's state is zero anyhow
        last = chunks[..., -1:]

        def each_group(t: Tensor) -> Tensor:
            return t.unsqueeze(2).expand(-1, -1, groups, *t.shape[2:]).flatten(0, 2).unsqueeze(1)

        return cls(
            apart=each_group(chunks.unsqueeze(-1) != chunks.unsqueeze(-2)),
            reads=each_group((chunks == before).to(dtype)),
            leaves=each_group((chunks == last).to(dtype)),
        )


@dataclass
class _Chunks:
    """The scan's inputs cut into chunks. n stands for b * chunks * groups, k for the heads of a group, q for a chunk.

    Attributes:
        x, dt: [n, k, p, q] and [n, k, 1, q].
        log_decay: [n, k, q], running sum of dt A from the chunk's first token to each.
        to_end: [n, k, 1, q], decay from each token to the end of its chunk.
        B, C: [n, state size, q].
        borders: between documents, None where each row is one document.
    """

    x: Tensor
    dt: Tensor
    log_decay: Tensor
    to_end: Tensor
    B: Tensor
    C: Tensor
    borders: _Borders | None

    @classmethod
    def cut(
        cls, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, documents: Tensor | None
    ) -> _Chunks:
        """Cut [s, b, ...] inputs whose length is a multiple of the chunk."""
        groups = B.shape[2]
        log_decay = _to_chunks((dt * A).unflatten(2, (groups, -1)), chunk_size).cumsum(-1)
        borders = None if documents is None else _Borders.cut(documents, chunk_size, groups, x.dtype)
        to_end = (log_decay[..., -1:] - log_decay).exp_()
        return cls(
            x=_to_chunks(x.unflatten(2, (groups, -1)), chunk_size),
            dt=_to_chunks(dt.unflatten(2, (groups, -1)), chunk_size).unsqueeze(2),
            log_decay=log_decay,
            to_end=(to_end if borders is None else to_end.mul_(borders.leaves)).unsqueeze(2),
            B=_to_chunks(B, chunk_size),
            C=_to_chunks(C, chunk_size),
            borders=borders,
        )

    def decay_matrices(self) -> Tensor:
        """exp(s_i - s_j) for j <= i, else 0: [n, k, q, q]."""
        size = self.log_decay.shape[-1]
        future = self.log_decay.new_full((size, size), float("-inf")).triu_(1)
        exponents = (self.log_decay.unsqueeze(-1) - self.log_decay.unsqueeze(-2)).add_(future)
        if self.borders is not None:
            exponents.masked_fill_(self.borders.apart, float("-inf"))
        return exponents.exp_()

    def scores(self) -> Tensor:
        """C_i . B_j for every group: [n, 1, q, q]."""
        return (self.C.mT @ self.B).unsqueeze(1)

    def from_start(self) -> Tensor:
        """Decay from the state that enters a chunk to each of its tokens: [n, k, 1, q]."""
        decay = self.log_decay.exp()
        return (decay if self.borders is None else decay.mul_(self.borders.reads)).unsqueeze(2)

    def chunk_decay(self) -> Tensor:
        """Decay of a state over a whole chunk: [n, k]."""
        return self.from_start()[..., 0, -1]


def _carry(states: Tensor, decay: Tensor, batch: int, groups: int) -> Tensor:
    """States that enter each chunk, from what each chunk adds: c_0 = 0, c_{i+1} = decay_i c_i + states_i.

    states: [n, k, p, state size], decay: [n, k] -> [n, k, p, state size].
    """
    added = states.unflatten(0, (batch, -1, groups))
    decay = decay.unflatten(0, (batch, -1, groups))[..., None, None]
    entering = torch.empty_like(added)
    entering[:, 0] = 0
    for chunk in range(1, added.shape[1]):
        before = chunk - 1
        torch.addcmul(added[:, before], entering[:, before], decay[:, before], out=entering[:, chunk])
    return entering.flatten(0, 2)


def _carry_gradient(entering: Tensor, decay: Tensor, batch: int, groups: int) -> Tensor:
    """Gradients of the states that leave each chunk, from those of its reads; shapes as in `_carry`."""
    entering = entering.unflatten(0, (batch, -1, groups))
    decay = decay.unflatten(0, (batch, -1, groups))[..., None, None]
    leaving = torch.empty_like(entering)
    leaving[:, -1] = 0
    for chunk in range(entering.shape[1] - 1, 0, -1):
        torch.addcmul(entering[:, chunk], leaving[:, chunk], decay[:, chunk], out=leaving[:, chunk - 1])
    return leaving.flatten(0, 2)


class _Scan(torch.autograd.Function):
    """The scan over whole chunks and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        chunk_size: int,
        documents: Tensor | None,
    ) -> Tensor:
        """[s, b, heads, head size] -> the same."""
        batch, groups = B.shape[1:3]
        chunks = _Chunks.cut(x, dt, A, B, C, chunk_size, documents)
        scaled = chunks.x * chunks.dt
        mixing = chunks.decay_matrices().mul_(chunks.scores())
        y = scaled.flatten(0, 1) @ mixing.flatten(0, 1).mT
        added = (scaled * chunks.to_end).flatten(1, 2) @ chunks.B.mT
        entering = _carry(added.unflatten(1, scaled.shape[1:3]), chunks.chunk_decay(), batch, groups)
        read = (entering.flatten(1, 2) @ chunks.C).view_as(scaled)
        y = y.view_as(scaled).addcmul_(read, chunks.from_start())
        result = _from_chunks(y, batch, groups).flatten(2, 3).addcmul_(x, D.unsqueeze(-1))
        ctx.save_for_backward(x, dt, A, B, C, D, result, entering, documents)
        ctx.chunk_size = chunk_size
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, dt, A, B, C and D.

        With Y the scan's result and X_t = dt_t x_t, the gradient of s_t is sum(dY_t Y_t) - sum(dX_t X_t): row t of the
        mixing matrices holds exp(s_t) and column t exp(-s_t). A chunk's last token adds the decay of the carried state.
        """
        x, dt, A, B, C, D, result, entering, documents = ctx.saved_tensors
        batch, groups = B.shape[1:3]
        chunks = _Chunks.cut(x, dt, A, B, C, ctx.chunk_size, documents)
        dY = _to_chunks(gradient.unflatten(2, (groups, -1)), ctx.chunk_size)
        X, decay = chunks.x * chunks.dt, chunks.chunk_decay()
        dX, dB, dC = _within_gradients(chunks, X, dY)

        reads = (dY * chunks.from_start()).flatten(1, 2)
        dC += entering.flatten(1, 2).mT @ reads
        dentering = (reads @ chunks.C.mT).view_as(entering)
        leaving = _carry_gradient(dentering, decay, batch, groups)
        dB += leaving.flatten(1, 2).mT @ (X * chunks.to_end).flatten(1, 2)
        dstate = (leaving.flatten(1, 2) @ chunks.B).view_as(X).mul_(chunks.to_end)
        dX += dstate

        skip = (gradient * x).sum(-1)
        dlog = _to_chunks(((gradient * result).sum(-1) - skip * D).unflatten(2, (groups, -1)), ctx.chunk_size)
        dlog -= (dX * X).sum(2)
        dlog[..., -1] += (dstate * X).sum((2, 3)) + (leaving * entering).sum((2, 3)) * decay
        # s is a running sum, so a token's dt A moves every later s of its chunk.
        dlog = _from_chunks(dlog.flip(-1).cumsum(-1).flip(-1), batch, groups).flatten(2)
        ddt = _from_chunks((dX * chunks.x).sum(2), batch, groups).flatten(2)
        dx = _from_chunks(dX.mul_(chunks.dt), batch, groups).flatten(2, 3).addcmul_(gradient, D.unsqueeze(-1))
        dB, dC = (_from_chunks(t, batch, groups) for t in (dB, dC))
        return dx, ddt.addcmul_(dlog, A), (dlog * dt).sum((0, 1)), dB, dC, skip.sum((0, 1)), None, None


def _within_gradients(chunks: _Chunks, X: Tensor, dY: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of X, B and C through the products inside the chunks."""
    decays, scores = chunks.decay_matrices(), chunks.scores()
    dmixing = (dY.flatten(0, 1).mT @ X.flatten(0, 1)).view_as(decays)
    dscores = dmixing.mul_(decays).sum(1)
    mixing = decays.mul_(scores)
    dX = (dY.flatten(0, 1) @ mixing.flatten(0, 1)).view_as(X)
    return dX, chunks.C @ dscores, chunks.B @ dscores.mT
