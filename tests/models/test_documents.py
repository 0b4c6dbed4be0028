"""Documents that share a row: nothing of one is seen in another, through attention, convolution or state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from models.megatron_cpu import megatron_device
from tests.models.conftest import LENGTH, TINY

Build = Callable[..., Any]
BORDERS = (1, 9, 16, 17, 30)  # of the first row; the second is one document


@pytest.fixture(scope="module")
def documents() -> torch.Tensor:
    first = torch.bucketize(torch.arange(LENGTH), torch.tensor(BORDERS), right=True)
    return torch.stack([first, torch.zeros_like(first)]).int()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_losses_are_those_of_each_document_alone(
    build: Build, tokens: torch.Tensor, documents: torch.Tensor, recompute: str
) -> None:
    model = build(recompute=recompute)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with megatron_device():
        packed = model(inputs, labels=labels, documents=documents)
        packed.sum().backward()  # full recompute reads the documents again
    for start, end in zip((0, *BORDERS), (*BORDERS, LENGTH), strict=True):
        with torch.no_grad(), megatron_device():
            alone = model(inputs[:1, start:end].contiguous(), labels=labels[:1, start:end].contiguous())
        torch.testing.assert_close(packed[:1, start:end], alone, rtol=2e-3, atol=2e-3)
    with torch.no_grad(), megatron_device():
        alone = model(inputs[1:], labels=labels[1:])
    torch.testing.assert_close(packed[1:], alone, rtol=2e-3, atol=2e-3)


def test_gradients_are_the_sum_over_the_documents(build: Build, tokens: torch.Tensor, documents: torch.Tensor) -> None:
    model = build()
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    model(inputs, labels=labels, documents=documents).sum().backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for start, end in zip((0, *BORDERS), (*BORDERS, LENGTH), strict=True):
        model(inputs[:1, start:end].contiguous(), labels=labels[:1, start:end].contiguous()).sum().backward()
    model(inputs[1:], labels=labels[1:]).sum().backward()
    for name, parameter in model.named_parameters():
        assert (packed[name] - parameter.grad).norm() / parameter.grad.norm() < 2e-2, name


def test_the_last_token_of_one_document_does_not_move_the_next(
    build: Build, tokens: torch.Tensor, documents: torch.Tensor
) -> None:
    model, border = build(), 16
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    changed = inputs.clone()
    changed[0, border - 1] = (changed[0, border - 1] + 1) % TINY.vocab_size
    before, after = (model(rows, labels=labels, documents=documents) for rows in (inputs, changed))
    assert torch.equal(before[0, border:], after[0, border:])
    assert not torch.equal(before[0, border - 1], after[0, border - 1])
    leaking = (model(rows, labels=labels) for rows in (inputs, changed))
    assert not torch.equal(*(losses[0, border:] for losses in leaking))
