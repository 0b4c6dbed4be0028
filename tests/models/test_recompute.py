"""Activation recompute, and the stand-ins for a CUDA device that it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from models.megatron_cpu import CpuRngStatesTracker, megatron_device

Build = Callable[..., Any]


def loss_and_gradients(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with megatron_device():
        loss = model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous())
        loss.mean().backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_no_bit(build: Build, tokens: torch.Tensor, recompute: str) -> None:
    expected_loss, expected = loss_and_gradients(build(), tokens)
    loss, gradients = loss_and_gradients(build(recompute=recompute), tokens)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize(
    ("recompute", "calls"),
    [
        ("none", {"mixer.in_proj": 1, "linear_fc1": 1, "linear_qkv": 1}),
        ("selective", {"mixer.in_proj": 1, "linear_fc1": 2, "linear_qkv": 1}),
        ("full", {"mixer.in_proj": 2, "linear_fc1": 2, "linear_qkv": 2}),
    ],
)
def test_what_is_computed_again(build: Build, tokens: torch.Tensor, recompute: str, calls: dict[str, int]) -> None:
    model, counts = build(recompute=recompute), dict.fromkeys(calls, 0)
    hooks = []
    for end in calls:
        module = next(module for name, module in model.named_modules() if name.endswith(end))

        def count(*_: Any, end: str = end) -> None:
            counts[end] += 1

        hooks.append(module.register_forward_pre_hook(count))
    loss_and_gradients(model, tokens)
    for hook in hooks:
        hook.remove()
    assert counts == calls


def test_stand_ins_leave_nothing_behind() -> None:
    before = (torch.cuda.current_device, torch.cuda.current_stream, torch.cuda.synchronize)
    with megatron_device(), megatron_device():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.empty(2, device="cuda").device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert (torch.cuda.current_device, torch.cuda.current_stream, torch.cuda.synchronize) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_tracker_keeps_streams_apart() -> None:
    tracker = CpuRngStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with tracker.fork("a"):
        first = torch.rand(3)
    with tracker.fork("b"):
        other = torch.rand(3)
    with tracker.fork("a"):
        second = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    stream = torch.rand(6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.cat((first, second)), stream)
    assert not torch.equal(first, other)
