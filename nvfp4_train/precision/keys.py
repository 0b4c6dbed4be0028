"""The keys of a micro-batch's random bits in the memory of a GPU, all in one tensor that is filled by one copy.

A kernel reads its key when it runs. Handed to it as a number, the key would be part of the launch, and a launch that is
recorded in a CUDA graph stays as it is: every replay would draw the random bits of the step that was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_train.precision.rounding import element_key, signed

# Global name of a linear, and which of its operands: `dgrad.gradient`, or `wgrad.signs` for signs that two share.
RandomOperand = tuple[str, str]


class DeviceKeys:
    """`rounding.element_key` of every random operand of a process's linears, for one micro-batch at a time.

    Args:
        operands: all that a micro-batch may ask for.
        device: where the keys are read.
    """

    def __init__(self, operands: Sequence[RandomOperand], device: torch.device) -> None:
        self._operands = list(operands)
        self._keys = torch.zeros(len(self._operands), dtype=torch.int64, device=device)
        self._views = dict(zip(self._operands, self._keys.unbind(), strict=True))

    def fill(self, seed: int, step: int, microbatch: int) -> None:
        """The keys of this micro-batch take the place of those before, once the GPU has come so far."""
        if not self._operands:
            return
        keys = [signed(element_key(seed, step, microbatch, *operand)) for operand in self._operands]
        host = torch.tensor(keys, dtype=torch.int64, pin_memory=self._keys.is_cuda)
        self._keys.copy_(host, non_blocking=True)

    def __getitem__(self, operand: RandomOperand) -> Tensor:
        """The key of an operand, int64 0-d."""
        return self._views[operand]
