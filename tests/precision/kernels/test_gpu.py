"""On a GPU: kernels against the reference bit for bit, GEMMs against float64, a whole linear against the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nvfp4_train.precision import quantize_values
from nvfp4_train.precision.delayed import AmaxHistories
from nvfp4_train.precision.gemm import gemm
from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.runtime import PrecisionRuntime
from nvfp4_train.precision.three_gemms import ThreeGemms
from tests.precision.linears import precision, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(16 * (1 + 7 * i % 23), 16 * (1 + 5 * i % 61)) for i in range(50)]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def test_golden_inputs_and_edges() -> None:
    from tests.precision.kernels import checks

    failed = [
        f"{n}: {found}" for n, x in (*checks.golden(), *checks.edges()) for found in checks.differences(x, "cuda")
    ]
    assert not failed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fifty_shapes(dtype: torch.dtype) -> None:
    from tests.precision.kernels import checks

    cases = [(shape, checks.matrix(*shape, seed, dtype)) for seed, shape in enumerate(SHAPES)]
    failed = [f"{shape}: {found}" for shape, x in cases for found in checks.differences(x, "cuda")]
    assert not failed


def test_large_operand() -> None:
    from tests.precision.kernels import checks

    assert not checks.differences(checks.matrix(2048, 1536, 9, torch.bfloat16), "cuda")


def test_a_part_of_a_matrix() -> None:
    from tests.precision.kernels import checks

    for shard in (checks.PART, checks.PART32):
        rows, columns = (axis.length for axis in shard if axis is not None)
        assert not checks.differences(checks.matrix(rows, columns, 7, torch.bfloat16), "cuda", shard=shard)


def test_rotated_groups_corrected_scales_and_row_scaling() -> None:
    from tests.precision.kernels import group_checks

    shapes = [(128, 128), (256, 384), (384, 1040), (1040, 256), (2048, 1536)]
    cases = [(f"{shape}", group_checks.matrix(*shape, n, torch.bfloat16)) for n, shape in enumerate(shapes)]
    cases += [(f"{shape} FP32", group_checks.matrix(*shape, n, torch.float32)) for n, shape in enumerate(shapes[:4])]
    failed = [
        f"{n}: {found}" for n, x in (*cases, *group_checks.inputs()) for found in group_checks.differences(x, "cuda")
    ]
    assert not failed + group_checks.parts("cuda")


SPECS = ["nvfp4", "nvfp4_four_over_six", "mxfp4", "mxfp8", "fp8_block", "fp8_current", "quartet2", "nemotron3_super"]


@pytest.mark.parametrize("name", SPECS)
def test_reference_quantizers_have_the_same_bits_there(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(256, 384, generator=generator)
    for source in (x, x.bfloat16()):
        for pair in precision(name, sizes=(384, 256)).operands.values():
            for operand in pair.values():
                for axis in (0, 1):
                    here = quantize_values(source, operand, key=7, axis=axis)
                    there = quantize_values(source.cuda(), operand, key=7, axis=axis)
                    assert torch.equal(there.values.cpu().float(), here.values), operand
                    assert here.scale is None or torch.equal(there.scale.cpu(), here.scale)  # type: ignore[union-attr]


@pytest.fixture
def factors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(272, 512, generator=generator, device="cuda").bfloat16()
    b = torch.randn(512, 144, generator=generator, device="cuda").bfloat16()
    return a, b, torch.tensor(3e-4, device="cuda"), torch.tensor(0.7, device="cuda")


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_products_in_every_layout(factors: tuple[Tensor, Tensor, Tensor, Tensor], layout: str) -> None:
    a, b, scale_a, scale_b = factors
    exact = (a.double() @ b.double()) * scale_a.double() * scale_b.double()
    a = a.t().contiguous().t() if layout[0] == "t" else a
    b = b.t().contiguous().t() if layout[1] == "t" else b
    assert error(gemm(a, b, scale_a=scale_a, scale_b=scale_b), exact) < 2e-3
    assert error(gemm(a, b, scale_a=scale_a, scale_b=scale_b, dtype=torch.float32), exact) < 1e-6
    assert error(gemm(a, b, scale_a=scale_a, dtype=torch.float32), exact / scale_b.double()) < 1e-6
    assert error(gemm(a, b, dtype=torch.float32), exact / scale_a.double() / scale_b.double()) < 1e-6


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_adds_to_a_buffer_that_is_aligned_to_nothing(
    factors: tuple[Tensor, Tensor, Tensor, Tensor], offset: int
) -> None:
    a, b, scale_a, scale_b = factors
    whole = torch.ones(272 * 144 + offset, device="cuda")
    buffer = whole[offset:].view(272, 144)
    found = gemm(a, b, scale_a=scale_a, scale_b=scale_b, dtype=torch.float32, add_to=buffer)
    assert found is buffer
    assert error(buffer, 1 + (a.double() @ b.double()) * scale_a.double() * scale_b.double()) < 1e-6
    assert bool((whole[:offset] == 1).all())


def test_a_scale_that_is_nan_shows() -> None:
    ones = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    assert bool(gemm(ones, ones, scale_a=torch.tensor(torch.nan, device="cuda")).isnan().all())


def one_pass(name: str, device: str, sampled: bool = False) -> tuple[Tensor, ...]:
    """Y, dX and dW (added twice to a buffer) of one linear, and how many weights it keeps."""
    x, w, dy = (t.to(device) for t in tensors(tokens=256, sizes=(384, 256)))
    runtime = PrecisionRuntime(5)
    runtime.sample_health = sampled
    gemms = ThreeGemms(precision(name, sizes=(384, 256)), runtime)
    runtime.histories = AmaxHistories(gemms.delayed_tensors(), 4, torch.device(device))
    runtime.expect([gemms.name])
    runtime.begin_step(1, Passes("recipe", "recipe"))
    runtime.begin_microbatch(0)
    call = runtime.call()
    y, kept = gemms.forward(x, w, None, call)
    along_out, along_tokens = gemms.gradients(dy, call, True, True)
    assert along_out is not None
    assert along_tokens is not None
    buffer = torch.zeros_like(w)
    for _ in range(2):
        gemms.weight_gradient(along_tokens, kept, call, buffer)
    return y.cpu(), gemms.input_gradient(along_out, w, call).cpu(), buffer.cpu()


@pytest.mark.parametrize("name", ["bf16", *SPECS, "fp8_delayed", "nvfp4_fwd_bf16_bwd", "bf16_fwd_nvfp4_bwd"])
def test_linear_equals_the_cpu_up_to_the_order_of_sums(name: str) -> None:
    for found, reference in zip(one_pass(name, "cuda"), one_pass(name, "cpu"), strict=True):
        assert error(found, reference.double()) < 2e-3


def test_sampling_health_changes_no_bit() -> None:
    for found, sampled in zip(one_pass("nvfp4", "cuda"), one_pass("nvfp4", "cuda", sampled=True), strict=True):
        assert torch.equal(found, sampled)


def test_no_wait_for_the_device() -> None:
    one_pass("nvfp4", "cuda")  # compiled
    x, w, dy = (t.cuda() for t in tensors(tokens=256, sizes=(384, 256)))
    runtime = PrecisionRuntime(5)
    gemms = ThreeGemms(precision("nvfp4", sizes=(384, 256)), runtime)
    runtime.expect([gemms.name])
    runtime.read_keys_from(x.device, gemms.random_operands())
    runtime.begin_step(1, Passes("recipe", "recipe"))
    runtime.begin_microbatch(0)
    call = runtime.call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, kept = gemms.forward(x, w, None, call)
        along_out, along_tokens = gemms.gradients(dy, call, True, True)
        assert along_out is not None
        assert along_tokens is not None
        gemms.input_gradient(along_out, w, call)
        gemms.weight_gradient(along_tokens, kept, call, torch.zeros_like(w))
    finally:
        torch.cuda.set_sync_debug_mode("default")
