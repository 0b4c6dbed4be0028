"""Quantized weights, made once per optimizer step instead of once per micro-batch.

An entry is valid for one `(epoch, weight._version, weight.data_ptr())`. The epoch is the runtime's count of announced
changes (a new step, an optimizer step, a loaded checkpoint, an evaluation); PyTorch's version counter catches every
in-place edit that autograd can see, and the address catches a parameter that was moved into another buffer. What none
of the three can see, an edit through `weight.data` in the middle of a step, must be announced with
`PrecisionRuntime.weights_changed()`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor


class WeightCache:
    """What was made of one weight: by key, for as long as the weight is what it was."""

    def __init__(self) -> None:
        self._valid_for: tuple[int, int, int] | None = None
        self._entries: dict[Hashable, Any] = {}

    def get(self, weight: Tensor, epoch: int, key: Hashable, make: Callable[[], Any]) -> Any:
        """The entry of `key`, made by `make` when the weight or the epoch is another than when it was made."""
        now = (epoch, weight._version, weight.data_ptr())
        if self._valid_for != now:
            self._entries.clear()
            self._valid_for = now
        if key not in self._entries:
            self._entries[key] = make()
        return self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)
