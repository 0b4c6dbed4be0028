"""The causal depthwise convolution of a Mamba-2 mixer in plain torch: a sum of shifted products, time first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None = None) -> Tensor:
    """y_t = bias + sum over k of weight[taps - 1 - k] * x_{t-k}, channel by channel; zero before the start.

    Args:
        x: [s, b, channels], FP32 or FP64 as everything else.
        weight: [channels, 1, taps], the last tap for the present token.
        bias: [channels].
        documents: [b, s], the number of each token's document in its row: nothing reaches over a border. None: one
            document a row.

    Returns:
        [s, b, channels].
    """
    return _CausalConvolution.apply(x, weight.squeeze(1), bias, documents)


def _within(values: Tensor, delay: int, documents: Tensor | None) -> Tensor:
    """[s - delay, b, channels] values of tokens `delay` apart, zero where these are of different documents."""
    if documents is None:
        return values
    return values * (documents[:, delay:] == documents[:, :-delay]).t().unsqueeze(-1)


class _CausalConvolution(torch.autograd.Function):
    """Shifts are slices along time, so nothing is padded, copied or transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
        """[s, b, channels], [channels, taps], [channels], [b, s] -> [s, b, channels]."""
        ctx.save_for_backward(x, weight, documents)
        length, present = x.shape[0], weight.shape[1] - 1
        y = torch.addcmul(bias, x, weight[:, present])
        for delay in range(1, min(present + 1, length)):
            y[delay:].addcmul_(_within(x[: length - delay], delay, documents), weight[:, present - delay])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias."""
        x, weight, documents = ctx.saved_tensors
        length, present = x.shape[0], weight.shape[1] - 1
        dx, dweight = gradient * weight[:, present], torch.zeros_like(weight)
        dweight[:, present] = (gradient * x).sum((0, 1))
        for delay in range(1, min(present + 1, length)):
            late = _within(gradient[delay:], delay, documents)
            dx[: length - delay].addcmul_(late, weight[:, present - delay])
            dweight[:, present - delay] = (late * x[: length - delay]).sum((0, 1))
        return dx, dweight, gradient.sum((0, 1)), None
