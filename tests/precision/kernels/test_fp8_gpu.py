"""FP8 tensor cores: codes bit for bit, GEMMs against PyTorch's and float64, whole linears against emulation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nvfp4_train.precision import QuantSpec
from nvfp4_train.precision.gemm import fp8_gemm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CURRENT, E5M2 = QuantSpec("fp8_current"), QuantSpec("fp8_current", element="e5m2")
ROWS, SQUARES = QuantSpec("fp8_block"), QuantSpec("fp8_block", (128, 128))
PAIRS = {
    "one scale": (CURRENT, CURRENT),
    "e5m2 by e4m3": (E5M2, CURRENT),
    "e4m3 by e5m2": (CURRENT, E5M2),
    "1x128 by 128x128": (ROWS, SQUARES),
    "1x128 by 1x128": (ROWS, ROWS),
}
# FP8 tensor cores keep fewer bits of their partial sums than FP32 has.
ACCUMULATION = 3e-4


def needs_blocks(*specs: QuantSpec) -> None:
    if any(spec.format == "fp8_block" for spec in specs) and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FP32 block scales need compute capability 9.0")


def test_codes_have_the_bits_of_the_reference() -> None:
    from tests.precision.kernels import checks, fp8_checks

    cases = [*fp8_checks.cases(), ("large", checks.matrix(1024, 1536, 9, torch.float32))]
    cases += [("large bf16", cases[-1][1].bfloat16())]
    failed = [f"{name}: {found}" for name, x in cases for found in fp8_checks.differences(x, "cuda")]
    assert not failed


def operands(first: QuantSpec, second: QuantSpec) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Codes and scales of a [512, 4096] and b [768, 4096], and their exact product."""
    from nvfp4_train.precision.kernels import fp8_launch
    from tests.precision.kernels.native_checks import decoded

    generator = torch.Generator("cuda").manual_seed(0)
    made = []
    for rows, spec in ((512, first), (768, second)):
        x = torch.randn(rows, 4096, generator=generator, device="cuda")
        codes, _ = fp8_launch.quantize_codes(x, spec, None)
        assert codes is not None
        made.append((codes.values, codes.scale))
    a, b = (decoded(codes, scale).double() for codes, scale in made)
    return made[0], made[1], a @ b.t()


@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_products(pair: tuple[QuantSpec, QuantSpec]) -> None:
    needs_blocks(*pair)
    (a, scale_a), (b, scale_b), exact = operands(*pair)
    wide = fp8_gemm(a, b, scale_a=scale_a, scale_b=scale_b, dtype=torch.float32)
    assert float((wide - exact).norm() / exact.norm()) < ACCUMULATION
    half = fp8_gemm(a, b, scale_a=scale_a, scale_b=scale_b)
    assert float((half - exact).norm() / exact.norm()) < 2e-3
    bias = torch.linspace(-1, 1, 768, device="cuda")
    assert torch.equal(fp8_gemm(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias), (wide + bias).bfloat16())


@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_pytorch_multiplies_to_the_same_bits(pair: tuple[QuantSpec, QuantSpec]) -> None:
    needs_blocks(*pair)
    from torch.nn.functional import ScalingType, scaled_mm

    kinds = {CURRENT: "TensorWise", E5M2: "TensorWise", ROWS: "BlockWise1x128", SQUARES: "BlockWise128x128"}
    (a, scale_a), (b, scale_b), _ = operands(*pair)
    first, second = (getattr(ScalingType, kinds[spec]) for spec in pair)
    scales = [scale if scale.dim() == 0 else scale.t() for scale in (scale_a, scale_b)]
    theirs = scaled_mm(a, b.t(), scales[0], first, scales[1], second, output_dtype=torch.float32)
    assert torch.equal(fp8_gemm(a, b, scale_a=scale_a, scale_b=scale_b, dtype=torch.float32), theirs)


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_adds_to_a_buffer_aligned_or_not(offset: int) -> None:
    (a, scale_a), (b, scale_b), exact = operands(E5M2, CURRENT)
    whole = torch.ones(512 * 768 + offset, device="cuda")
    buffer = whole[offset:].view(512, 768)
    found = fp8_gemm(a, b, scale_a=scale_a, scale_b=scale_b, dtype=torch.float32, add_to=buffer)
    assert found is buffer
    assert float((buffer - 1 - exact).norm() / exact.norm()) < ACCUMULATION
    assert bool((whole[:offset] == 1).all())


@pytest.mark.parametrize("name", ["fp8_block", "fp8_current", "fp8_delayed"])
@pytest.mark.parametrize("case", [0, 1, 2])
def test_linear_equals_its_emulation(name: str, case: int) -> None:
    from tests.precision.kernels.native_checks import CASES, error, passes

    if name == "fp8_block":
        needs_blocks(ROWS)
    native, emulated = passes(name, "cuda", True, *CASES[case]), passes(name, "cpu", False, *CASES[case])
    for found, expected in zip(native, emulated, strict=True):
        assert error(found, expected) < 2e-3
    for found, expected in zip(native[3:], emulated[3:], strict=True):
        assert torch.equal(found, expected), "amax histories"
