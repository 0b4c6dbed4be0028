"""NVFP4: four bits an element, made usable by two levels of scales.

An E2M1 element knows the magnitudes 0, .5, 1, 1.5, 2, 3, 4 and 6. Sixteen neighbours share an E4M3 scale that moves
their largest magnitude near 6; E4M3 itself reaches only from 2^-9 to 448, so an FP32 scale of the whole tensor first
moves the tensor's largest block there. In FP32 and in this order, which decides the last bits:

    amax    = max |x| over the tensor
    s_enc   = min(448 * 6 / amax, FP32_MAX), 1 where amax is not finite
    s_dec   = 1 / s_enc
    S       = e4m3(min(amax_block * (s_enc * (1/6)), 448))
    enc     = min(1 / (S * s_dec), FP32_MAX)               from the ROUNDED scale, so that decoding undoes encoding
    element = e2m1(clamp(x * enc, -6, 6))
    value   = element * S * s_dec

`element * S` has at most six significant bits, so it is exact in BF16: a BF16 GEMM over those products, with FP32
accumulation and both tensor scales applied to the accumulator, is the NVFP4 GEMM.

A block far smaller than the tensor's largest gets S = 0 and decodes to zeros. A tensor with an inf or NaN gets NaN as
its s_dec, so that it cannot hide behind a finite 6 * 448. Row scaling has an amax, s_enc and s_dec for each row.

Source: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, and Transformer Engine's reference quantizer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_train.precision.blocks import Loaded, Scaled

FP32_MAX = torch.finfo(torch.float32).max
E4M3_MAX = 448.0
# Largest product of a block scale and an element.
TOP = E4M3_MAX * 6.0


def constant(value: float, like: Tensor) -> Tensor:
    """A number as a float32 tensor: a quotient with a plain number may become a product with a reciprocal."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def tensor_scales(amax: Tensor, top: float = TOP) -> tuple[Tensor, Tensor]:
    """Encode and decode scale (s_enc, s_dec) of each amax, float32. s_dec is NaN where amax is not finite."""
    s_enc = torch.clamp(constant(top, amax) / amax, max=FP32_MAX)
    finite = torch.isfinite(amax)
    s_enc = torch.where(finite, s_enc, 1.0)
    s_dec = torch.where(finite, constant(1.0, amax) / s_enc, float("nan"))
    return s_enc, s_dec


def to_e4m3(scales: Tensor) -> Tensor:
    """Nearest E4M3 of non-negative float32 scales, 448 beyond; a NaN becomes 448, its tensor scale says NaN already."""
    # Clamped first: the cast saturates on some builds of torch and gives NaN on others.
    return torch.nan_to_num(scales, nan=E4M3_MAX).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)


def block_scales(block_amax: Tensor, s_enc: Tensor) -> Tensor:
    """Decode scale S of each block as stored, float8_e4m3fn."""
    return to_e4m3(block_amax * (s_enc * constant(1.0, s_enc).div(constant(6.0, s_enc))))


def encode_scales(stored: Tensor, s_enc: Tensor) -> Tensor:
    """What x is multiplied by: min(1 / (S * s_dec), FP32_MAX), float32, from float8 or float32 `stored`."""
    s_dec = constant(1.0, s_enc) / s_enc
    return torch.clamp(constant(1.0, s_enc) / (stored.float() * s_dec), max=FP32_MAX)


def scale(loaded: Loaded, amax: Tensor) -> Scaled:
    """NVFP4 scales of a matrix, following `amax`: 0-d, or compact [rows, 1] or [1, columns] for row scaling."""
    s_enc, s_dec = tensor_scales(amax)
    stored = block_scales(loaded.block_amax, s_enc)
    return Scaled(encode_scales(stored, s_enc), stored, stored.float(), tensor_decode(s_dec))


def tensor_decode(s_dec: Tensor) -> Tensor:
    """s_dec as a result carries it: 0-d, or [rows of the operand]."""
    return s_dec if s_dec.dim() == 0 else s_dec.flatten()
