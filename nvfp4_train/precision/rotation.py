"""The randomized Hadamard transform: spread an outlier over its group before four bits have to hold it.

One large value in a block of sixteen pushes the other fifteen towards zero. Multiplying a group of n values by an
orthogonal matrix whose entries all have the same size spreads the outlier evenly. If both operands of a GEMM are
transformed along the contraction, the transform cancels in the product, so nothing has to be undone:

    row of n values  ->  row * diag(signs) * H_n / sqrt(n)
    Sylvester's H_n:     H_1 = [1],  H_2n = [[H_n, H_n], [H_n, -H_n]]

The random signs keep inputs that look like a Hadamard row from being gathered into one value. The product is computed
by the fast transform in FP32, always in the same order, so that every implementation gives the same bits: each value
times sign * fl(1/sqrt(n)) first (so that no sum overflows that the result would not), then log2(n) stages of sums and
differences (neighbours, then pairs of pairs, ...), then one rounding to the input's dtype.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.rounding import Key, philox

# Signs of the published NVFP4 recipe: one vector for all layers and the whole run.
FIXED_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def signs_of(spec: QuantSpec, key: Key, device: torch.device | str = "cpu") -> Tensor:
    """Signs of a rotation as float32 [spec.rotation].

    Fixed signs repeat the sixteen published ones. Fresh signs are the bits of Philox under `key` at counter words
    (0, 0, 1, 0), which no element's random byte uses: bit i of word 0 is that of element i, 1 means minus, word 1
    follows.
    """
    assert spec.rotation is not None
    if spec.signs == "fixed":
        return _fixed_signs(spec.rotation, torch.device(device))
    words = philox(key, (0, 0, 1, 0))
    places = torch.arange(32, device=device)
    bits = torch.cat([(word >> places) & 1 for word in words[: -(-spec.rotation // 32)]])
    return (1 - 2 * bits[: spec.rotation]).float()


@cache
def _fixed_signs(size: int, device: torch.device) -> Tensor:
    signs = [float(FIXED_SIGNS[index % len(FIXED_SIGNS)]) for index in range(size)]
    return torch.tensor(signs, dtype=torch.float32, device=device)


def rotate(x: Tensor, spec: QuantSpec, key: Key = 0, axis: int = 1) -> Tensor:
    """The rotated copy that a quantizer with this spec quantizes, in x's dtype and layout.

    Args:
        x: [M, N] float32 or bfloat16; its size along `axis` is padded with zeros to a multiple of the rotation.
        spec: its rotation and signs; without a rotation x is returned.
        key: of fresh signs.
        axis: 1 rotates along N, 0 along M.
    """
    if spec.rotation is None:
        return x
    missing = -x.shape[axis] % spec.rotation
    if missing:
        x = torch.nn.functional.pad(x, (0, missing) if axis == 1 else (0, 0, 0, missing))
    work = x.to(torch.float32, copy=True).contiguous()
    return rotate_(work, torch.empty_like(work), signs_of(spec, key, x.device), axis).to(x.dtype)


def rotate_(work: Tensor, scratch: Tensor, signs: Tensor, axis: int) -> Tensor:
    """Rotate float32 `work` [M, N] along `axis`, in place or in `scratch` of the same shape: use what is returned."""
    size = len(signs)
    rows, columns = work.shape
    inner = columns if axis == 0 else 1
    groups = rows * columns // (size * inner)
    work.view(groups, size, inner).mul_((signs * (1.0 / math.sqrt(size))).view(size, 1))
    half = 1
    while half < size:
        source = work.view(groups, size // (2 * half), 2, half * inner)
        target = scratch.view(groups, size // (2 * half), 2, half * inner)
        (first, second), (total, difference) = source.unbind(2), target.unbind(2)
        torch.add(first, second, out=total)
        torch.sub(first, second, out=difference)
        work, scratch = scratch, work
        half *= 2
    return work
