"""E2M1 codes: sign, two exponent bits, one mantissa bit; two codes a byte, the even element in the low nibble."""

from __future__ import annotations

import torch
from torch import Tensor

# Magnitude of codes 0 to 7; codes 8 to 15 are the negatives, 8 is minus zero.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode_codes(elements: Tensor, negative: Tensor) -> Tensor:
    """Pack E2M1 values.

    Args:
        elements: float32 [M, N] of E2M1 values; a NaN takes code 0.
        negative: bool [M, N]: the sign bit of each code (a value that was rounded to zero keeps its sign).

    Returns:
        uint8 [M, ceil(N/2)]; the last high nibble of an odd N is 0.
    """
    halves = torch.nan_to_num(elements.abs() * 2, nan=0.0).to(torch.int64)
    table = torch.zeros(13, dtype=torch.uint8, device=elements.device)
    for code, magnitude in enumerate(MAGNITUDES):
        table[int(2 * magnitude)] = code
    codes = table[halves] | (negative.to(torch.uint8) << 3)
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def decode_codes(codes: Tensor) -> Tensor:
    """Unpack uint8 [M, N/2] to float32 [M, N]."""
    table = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=torch.float32, device=codes.device)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    return table[nibbles.to(torch.int64)]
