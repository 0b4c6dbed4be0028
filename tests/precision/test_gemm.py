"""The emulated GEMM against stored results and against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_train.precision import QuantSpec, quantize_values
from nvfp4_train.precision.gemm import gemm

GOLDEN = Path(__file__).parents[1] / "golden" / "gemm_m64_k96_n128_bf16.npz"


def _bf16(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.astype(np.int32) << 16).view(torch.float32).bfloat16()


@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
def test_stored_products_of_the_reference_quantizer(product: str) -> None:
    stored = np.load(GOLDEN)
    x, w, dy = (_bf16(stored[name]) for name in ("x", "w", "dy"))
    row, square, rotated = QuantSpec("nvfp4"), QuantSpec("nvfp4", tile=(16, 16)), QuantSpec("nvfp4", rotation=16)
    if product == "wgrad":
        a, b = (quantize_values(t, rotated, axis=0) for t in (dy, x))
        left, right = a.values.t(), b.values
    else:
        a, b = quantize_values(x if product == "fprop" else dy, row), quantize_values(w, square)
        left, right = a.values, b.values.t() if product == "fprop" else b.values
    exact = torch.from_numpy(stored[f"{product}.f32"])

    found = gemm(left, right, scale_a=a.scale, scale_b=b.scale, dtype=torch.float32)
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-6

    rounded = gemm(left, right, scale_a=a.scale, scale_b=b.scale)
    assert torch.equal(rounded, found.bfloat16())
    assert float((rounded == _bf16(stored[f"{product}.bf16"])).float().mean()) > 0.995  # the rest sits on a midpoint


def test_scales_whose_product_is_denormal() -> None:
    big, tiny = torch.full((2, 16), 1e15), torch.tensor(1e-25)
    found = gemm(big, big.t(), scale_a=tiny, scale_b=tiny, dtype=torch.float32)
    torch.testing.assert_close(found, torch.full((2, 2), 16e30 * 1e-25 * 1e-25), rtol=1e-6, atol=0)


def test_rounds_once() -> None:
    # 1 + 2^-8 is a midpoint of BF16 and would go down to 1; times 1.5 it is 1.505859375, which rounds up to 1.5078125.
    a, b = torch.tensor([[1.0, 2.0**-8]]), torch.ones(2, 1)
    assert float(gemm(a, b, scale_a=torch.tensor(1.5))) == 1.5078125


def test_row_scales_and_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 8, generator=generator), torch.randn(8, 3, generator=generator)
    rows, columns, bias = (
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
        torch.tensor([0.5, 1.0, 2.0]),
        torch.tensor([1.0, -1.0, 0]),
    )
    exact = (a.double() @ b.double()) * rows[:, None].double() * columns.double() + bias.double()
    found = gemm(a, b, scale_a=rows, scale_b=columns, bias=bias, dtype=torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(gemm(a, b, scale_a=rows, scale_b=columns, bias=bias), found.bfloat16())


def test_adds_to_a_buffer_in_place() -> None:
    buffer = torch.ones(2, 2)
    found = gemm(torch.eye(2), torch.eye(2), scale_a=torch.tensor(3.0), dtype=torch.float32, add_to=buffer)
    assert found is buffer
    assert torch.equal(buffer, torch.tensor([[4.0, 1.0], [1.0, 4.0]]))
