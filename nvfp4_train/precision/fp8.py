"""FP8: eight bits an element; one FP32 scale for a block, or for the whole tensor.

E4M3 has three mantissa bits and reaches 448, E5M2 has two and reaches 57344. With

    enc = fl(max / amax)   (FP32_MAX where that is infinite, 1 where amax is 0 or not finite)

the largest magnitude becomes the element type's largest: elements are the nearest of x * enc, clamped, and decode
by 1 / enc.

    fp8_block    amax of a block: 128x128 of a weight, 1x128 along the contraction of anything else (after DeepSeek-V3,
                 arXiv 2412.19437). An outlier then costs its own block alone. Option `power_of_two` rounds enc down
                 to a power of two, as Transformer Engine does by default.
    fp8_current  amax of this very tensor
    fp8_delayed  amax given by the caller: the largest of a history, known before the tensor is

A block or tensor with an inf or NaN decodes to NaN, so that a saturating cast cannot hide it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_train.precision.blocks import Loaded, Scaled
from nvfp4_train.precision.formats import ELEMENT_MAX
from nvfp4_train.precision.nvfp4 import FP32_MAX, constant

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def encode_scale(amax: Tensor, element: str, power_of_two: bool = False) -> Tensor:
    """What x is multiplied by, float32, for each amax."""
    enc = torch.clamp(constant(ELEMENT_MAX[element], amax) / amax, max=FP32_MAX)
    enc = torch.where(torch.isfinite(amax) & (amax > 0), enc, 1.0)
    if power_of_two:
        enc = (enc.view(torch.int32) & 0x7F800000).view(torch.float32)
    return enc


def decode_scale(enc: Tensor, amax: Tensor) -> Tensor:
    """1 / enc, NaN where amax is not finite."""
    return torch.where(torch.isfinite(amax), constant(1.0, enc) / enc, float("nan"))


def scale_blocks(loaded: Loaded, power_of_two: bool) -> Scaled:
    """Scales of fp8_block."""
    enc = encode_scale(loaded.block_amax, "e4m3", power_of_two)
    decode = decode_scale(enc, loaded.block_amax)
    return Scaled(enc, decode, decode, None)


def scale_tensor(loaded: Loaded, amax: Tensor, element: str) -> Scaled:
    """Scale of fp8_current and fp8_delayed, following `amax`."""
    enc = encode_scale(amax, element)
    return Scaled(enc.expand(loaded.blocks.scale_shape), None, None, decode_scale(enc, amax))
