"""Launches of kernels that cost the host little.

Triton looks at every argument of every launch to find the kernel that it compiled for arguments of that kind, which
takes longer than a small kernel runs. A run launches the same kernels at the same few shapes again and again: what
Triton found is kept here by dtypes and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; what Triton compiles for, by an address's being a multiple of it or not
_found: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, int], tensors: Sequence[Tensor], numbers: Sequence[float | bool], **options: Any
) -> None:
    """`kernel[grid](*tensors, *numbers, **options)`.

    Args:
        kernel: of `triton.jit`.
        tensors, numbers: its arguments in their order, constants among the numbers.
        options: how it is compiled; always the same for a kernel with these numbers.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    aligned = [address % _ALIGNMENT == 0 for address in addresses]
    device = tensors[0].device.index
    key = (id(kernel), device, *numbers, *aligned, *[tensor.dtype for tensor in tensors])
    found = _found.get(key)
    if found is not None:
        found[*grid, 1](*addresses, *numbers, stream=torch._C._cuda_getCurrentRawStream(device))
        return
    found = kernel[grid](*tensors, *numbers, **options)
    if found is not None:  # Triton's interpreter compiles nothing
        _found[key] = found
