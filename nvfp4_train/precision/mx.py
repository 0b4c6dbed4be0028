"""MXFP4 and MXFP8: blocks of 32 with a power of two as their scale (OCP Microscaling v1.0).

A power of two costs eight bits (E8M0, the exponent plus 127) and no multiplication in hardware, but it can only bring
the largest magnitude of a block within a factor of two of the element type's largest. Which power:

    up    e = ceil(log2(amax_block / element max)): nothing saturates. Rounding down can make training diverge.
    ocp   e = floor(log2(amax_block)) - emax, emax 2 (E2M1) or 8 (E4M3): as specified; large values may saturate.

e lies in [-127, 127]; a block of zeros takes -127. A block with an inf or NaN takes the byte 255, which E8M0 reads as
NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_train.precision.blocks import Loaded, Scaled
from nvfp4_train.precision.formats import ELEMENT_MAX

_EMAX = {"e2m1": 2, "e4m3": 8}
E8M0_NAN = 255


def block_exponents(block_amax: Tensor, element: str, scale_rounding: str) -> Tensor:
    """Exponent e of each block's scale 2^e, int32 in [-127, 127]."""
    # amax = mantissa * 2^exponent with mantissa in [1/2, 1); exact, where a logarithm would not be.
    mantissa, exponent = torch.frexp(torch.where(torch.isfinite(block_amax), block_amax, 0.0))
    if scale_rounding == "ocp":
        e = exponent - 1 - _EMAX[element]
    else:
        top = ELEMENT_MAX[element] / 2.0 ** (_EMAX[element] + 1)
        e = exponent - (_EMAX[element] + 1) + (mantissa > top)
    return torch.where(mantissa == 0, -127, e).clamp_(-127, 127).to(torch.int32)


def decode_e8m0(stored: Tensor) -> Tensor:
    """2^(byte - 127) as float32, NaN for 255."""
    return torch.where(stored == E8M0_NAN, float("nan"), _power_of_two(stored.to(torch.int32) - 127))


def scale_blocks(loaded: Loaded, element: str, scale_rounding: str) -> Scaled:
    """Scales of mxfp4 and mxfp8; stored as uint8 E8M0 bytes."""
    e = block_exponents(loaded.block_amax, element, scale_rounding)
    stored = torch.where(torch.isfinite(loaded.block_amax), e + 127, E8M0_NAN).to(torch.uint8)
    return Scaled(_power_of_two(-e), stored, decode_e8m0(stored), None)


def _power_of_two(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
