"""The GEMM of emulated low precision: exact products, an FP32 accumulator, scales on the accumulator, one rounding.

A quantized operand is `values * scale`. The values (element times block scale) are exact in BF16, so the vendor's
BF16 GEMM with FP32 accumulation computes the low-precision product up to the order of the sum. What is left, each
operand's tensor (or row) scale, is no power of two: folding it into the values would round them, rounding the output
before the scales would round twice. So the scales multiply the accumulator, one after the other (their product alone
may be denormal), and the result is rounded once.

On a GPU both happen inside the GEMM, which reads its factor from device memory (`kernels/cublaslt.py`). That factor is
one number, the product of both scales, and so must be one FP32 can hold: below 2^-126 it loses bits. Operands whose
largest magnitudes multiply to 1e-31 would come there; a training step's gradients are far from it.

A cheaper form, `precision.gemm=bf16_scaled`, hands over operands that are scaled and rounded to BF16 already; then
this is a plain BF16 GEMM, and each operand is off by at most 2^-9 of a value. It pays where the exact one is FP32, as
for the emulated fp8_block.

Where the hardware multiplies FP8 itself (`fp8_gemm`), operands come as float8 codes with their scales
(`kernels/fp8_launch.py`), and the product is the emulated one up to the order of the sum.

On a CPU BF16 GEMMs are slow and the accumulator is not FP32 everywhere; values are FP32 there and the products are
the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_train.precision.kernels import cublaslt

_FP8_ALIGNMENT = 16  # bytes, of every matrix of an FP8 GEMM


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    add_to: Tensor | None = None,
    start: bool = False,
) -> Tensor:
    """a b, times both scales and plus the bias in FP32, rounded once to `dtype`.

    Args:
        a: values [M, K], any strides; FP32, or BF16 on CUDA.
        b: values [K, N], likewise.
        scale_a: FP32; 0-d for the tensor or [M] for its rows; None for 1.
        scale_b: FP32; 0-d for the tensor or [N] for the columns; None for 1.
        bias: [N] or None.
        dtype: of the result, bfloat16 or float32.
        add_to: FP32 [M, N] to which an FP32 result is added in place (a gradient buffer), or None.
        start: write over what `add_to` held instead.

    Returns:
        [M, N]; `add_to` itself where it is given.
    """
    factors = [] if scale_a is None else [scale_a[:, None] if scale_a.dim() == 1 else scale_a]
    factors += [] if scale_b is None else [scale_b]
    half = a.dtype == torch.bfloat16 and b.dtype == torch.bfloat16
    if half and dtype == torch.bfloat16 and not factors and bias is None:
        return torch.mm(a, b)  # the vendor's kernel rounds once itself
    if half and a.is_cuda and bias is None and all(factor.dim() == 0 for factor in factors):
        return _scaled_inside(a, b, factors, dtype, add_to, start)
    product = _product(a, b, half)
    last = len(factors) if bias is None and dtype != torch.float32 else -1
    for i, factor in enumerate(factors, start=1):
        if i == last:  # rounded as it is written
            return torch.mul(product, factor, out=torch.empty_like(product, dtype=dtype))
        product.mul_(factor)
    if bias is not None:
        product.add_(bias)
    if add_to is not None:
        return written(product, add_to, start)
    return product.to(dtype)


def written(product: Tensor, buffer: Tensor, start: bool) -> Tensor:
    """The buffer, with the product added or, at the `start` of a sum, in place of what it held."""
    return buffer.copy_(product) if start else buffer.add_(product)


def _scaled_inside(
    a: Tensor, b: Tensor, factors: list[Tensor], dtype: torch.dtype, add_to: Tensor | None, start: bool
) -> Tensor:
    """The whole of `gemm` in one kernel, for scales that are one number each."""
    scale = torch.mul(*factors) if len(factors) == 2 else factors[0] if factors else None
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device) if add_to is None else add_to
    transposed = [x.stride(1) != 1 for x in (a, b)]
    a, b = (x.t() if turn else x for x, turn in zip((a, b), transposed, strict=True))
    return cublaslt.scaled_mm(
        a,
        b,
        scale,
        transpose_a=transposed[0],
        transpose_b=transposed[1],
        out=out,
        accumulate=add_to is not None and not start,
    )


def fp8_gemm(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    add_to: Tensor | None = None,
    start: bool = False,
) -> Tensor:
    """a b^T of FP8 operands on FP8 tensor cores; a bias is added to the FP32 product.

    Args:
        a: float8 codes [M, K], contiguous.
        b: float8 codes [N, K], likewise.
        scale_a, scale_b: as `fp8_launch` makes them.
        bias, dtype, add_to, start: as of `gemm`.

    Returns:
        [M, N]; `add_to` itself where it is given.
    """
    in_place = add_to is not None and add_to.data_ptr() % _FP8_ALIGNMENT == 0
    accumulated = torch.float32 if bias is not None else dtype
    out = add_to if in_place else torch.empty(a.shape[0], b.shape[0], dtype=accumulated, device=a.device)
    assert out is not None
    cublaslt.fp8_mm(a, b, scale_a, scale_b, out=out, accumulate=in_place and not start)
    if bias is not None:
        return out.add_(bias).to(dtype)
    return out if add_to is None or in_place else written(out, add_to, start)


def _product(a: Tensor, b: Tensor, half: bool) -> Tensor:
    """a b as FP32 [M, N]."""
    if half and a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    assert a.is_cpu or not torch.backends.cuda.matmul.allow_tf32, "FP32 values need FP32 GEMMs, and TF32 is switched on"
    return torch.mm(a.float(), b.float())
