"""What a step comes to: its loss, the norm of its gradient, and what the update multiplies the gradients by.

All of it is computed where the gradients are, so the update is launched before the host has seen a number: where loss
or norm is not finite its factor is NaN, which tells it to leave everything as it is. The host learns that afterwards,
when it waits for the device, once a step.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nvfp4_train.distributed import World, each_replicas


class HostCopy:
    """A tensor on its way to the host.

    Args:
        values: what the device was told to compute. Asking for them waits for nothing that it is told after them.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)  # from a GPU into pinned memory, without waiting
        self._arrived = torch.cuda.Event() if values.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def tolist(self) -> Any:
        """The values, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


class LossSum:
    """The loss of a global batch, summed in the order of its micro-batches: the same bits in every layout.

    Args:
        sums: of this rank's micro-batches, FP64 [micro-batches, (nats, valid tokens)].
        world: where this process stands; every rank of it must come here.

    Attributes:
        nats: their sum in any order, FP64 [] on the device.
        tokens: how many are valid, FP64 [] on the device.
    """

    def __init__(self, sums: Tensor, world: World) -> None:
        in_order = each_replicas(sums, world).transpose(0, 1).flatten(0, 1)
        self.nats, self.tokens = in_order.sum(0).unbind()
        self._on_host = HostCopy(in_order)

    @cached_property
    def mean(self) -> float:
        """Nats a token, in FP64; 0 where no token is valid. Waits for the device."""
        pairs = self._on_host.tolist()
        nats, tokens = sum(nats for nats, _ in pairs), sum(tokens for _, tokens in pairs)
        return float(nats / tokens) if tokens else 0.0


class Found(NamedTuple):
    """Loss in nats a token, norm of the mean gradient, and whether the step is skipped: the same on all ranks."""

    loss: float
    norm: float
    skipped: bool


class Outcome:
    """Of a step whose passes the device may still be at.

    Args:
        loss: of its global batch.
        norm: of all summed gradients, FP64 [].
        limit: see `update_factor`.
        world: where this process stands; every rank of it must come here.

    Attributes:
        factor: what the update multiplies the gradients by, FP64 [] on the device; NaN where the loss or the norm is
            not finite on any rank.
    """

    def __init__(self, loss: LossSum, norm: Tensor, limit: float, world: World) -> None:
        mean = of_mean(norm, loss.tokens)
        unsound = 0.0 * (mean + loss.nats)  # NaN or 0
        if world.size > 1:
            dist.all_reduce(unsound)
        self.factor = update_factor(mean, limit, loss.tokens) + unsound
        self._loss, self._on_host = loss, HostCopy(torch.stack((mean, self.factor)))

    def wait(self) -> Found:
        """Waits for the device, but not for an update that was launched since."""
        norm, factor = self._on_host.tolist()
        return Found(self._loss.mean, norm, skipped=factor != factor)


def of_mean(norm: Tensor, tokens: Tensor) -> Tensor:
    """The norm of the mean gradient over valid tokens, rounded to FP32: the same bits in every layout. All FP64 []."""
    return (norm / tokens.clamp(min=1)).float().double()


def update_factor(norm: Tensor, limit: float, tokens: Tensor) -> Tensor:
    """What an update multiplies the summed gradients by: their mean, shortened to `limit` where its `norm` is larger.

    Tensors are FP64 []; a limit of 0 clips nothing.
    """
    whole = torch.ones_like(norm)
    # `limit / norm` would multiply by norm's reciprocal, which is rounded.
    clip = torch.where(norm > limit, torch.full_like(norm, limit) / norm, whole) if limit > 0 else whole
    return clip / tokens.clamp(min=1)
