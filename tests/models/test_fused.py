"""Fused kernels without a GPU (Triton's interpreter runs them in processes of its own), and how kernels are trusted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelError
from tests.interpreter import checked_in_interpreter
from tests.models.conftest import TINY


def test_kernels_equal_torch() -> None:
    assert checked_in_interpreter("tests.models.fused_checks").endswith("equal\n")


def test_functions_are_compared_with_torch(megatron: None) -> None:
    from models.pointwise import choose_pointwise, compare_pointwise, squared_relu

    device = torch.device("cpu")
    plain = choose_pointwise(TINY, device)
    assert not plain.fused
    assert compare_pointwise(TINY, plain, device) == 0
    near = replace(plain, squared_relu=lambda x: squared_relu(x) * 1.01, description="near")
    assert near.fused
    assert 0.005 < compare_pointwise(TINY, near, device) < 0.02
    no_gradient = replace(plain, norm=lambda x, w, eps, group: plain.norm(x, w, eps, group).detach() + 0 * x * w)
    with pytest.raises(ModelError, match=r"the norm or its gradient differs .* by 1 .*kernels=torch"):
        compare_pointwise(TINY, no_gradient, device)
    not_a_number = replace(plain, cross_entropy=lambda x, labels, group: x.float().sum(-1) * float("nan"))
    with pytest.raises(ModelError, match=r"the loss or its gradient differs .* by nan"):
        compare_pointwise(TINY, not_a_number, device)


def test_an_attention_kernel_is_compared_with_the_definition() -> None:
    from models.attention import AttentionKernel, choose_attention, compare_attention, torch_attention

    device = torch.device("cpu")
    assert choose_attention(TINY, device).function is torch_attention
    assert 0 < compare_attention(TINY, AttentionKernel(torch_attention, "attention: good"), device) < 1e-2

    def sees_the_future(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)

    def no_gradient_of_keys(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return torch_attention(query, key.detach() + 0 * key, value, scale)

    def not_supported(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        raise RuntimeError("No valid execution plans built")

    with pytest.raises(ModelError, match=r"attention: bad: it does not run here: No valid .*kernels=torch"):
        compare_attention(TINY, AttentionKernel(not_supported, "attention: bad"), device)
    with pytest.raises(ModelError, match=r"attention: bad: the .* differs .*limit 0.02.*kernels=torch"):
        compare_attention(TINY, AttentionKernel(sees_the_future, "attention: bad"), device)
    with pytest.raises(ModelError, match=r"attention: bad: the gradient of the key differs .* by 1 "):
        compare_attention(TINY, AttentionKernel(no_gradient_of_keys, "attention: bad"), device)


def test_attention_in_a_fixed_order_is_not_cudnns() -> None:
    from models.attention import choose_attention, torch_attention

    torch.use_deterministic_algorithms(True)
    try:
        kernel = choose_attention(TINY, torch.device("cuda"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernel.function is torch_attention
    assert "no fixed order" in kernel.description
