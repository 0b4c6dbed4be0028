"""Delayed scaling: a tensor's scale follows the largest amax of the steps before, so it is known before the tensor is.

One entry a step and tensor: the maximum over the step's micro-batches (and over ranks, through `reduce`). An amax that
is not finite is not entered: it would blind the scale for as long as the history is long, and the step that saw it is
skipped anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

_NONE = -1.0  # of a tensor that has not been quantized in this step


class AmaxHistories:
    """Histories of the tensors named at construction, newest entry first.

    All of them lie in one buffer, and which tensors were seen in a step is a matter of its content: a step ends in the
    same few operations whatever ran in it, and a step that is replayed as a CUDA graph needs no more than its kernels.

    Args:
        names: `<linear>.<input|weight|gradient>`.
        length: entries kept of each.
        device: where the tensors live.
    """

    def __init__(self, names: Sequence[str], length: int, device: torch.device) -> None:
        self._index = {name: i for i, name in enumerate(names)}
        self._history = torch.zeros(len(names), length, device=device)
        self._largest = torch.zeros(len(names), device=device)
        self._step = torch.full((len(names),), _NONE, device=device)
        self._largest_of = dict(zip(names, self._largest, strict=True))
        self._entry_of = dict(zip(names, self._step, strict=True))

    def amax(self, name: str) -> Tensor:
        """Largest entry of `name`, FP32 0-d: 0 (which quantizers scale by 1) before the first."""
        return self._largest_of[name]

    def entry(self, name: str) -> Tensor:
        """The step's maximum of `name`, FP32 0-d, for a kernel that takes it to the larger of itself and an amax."""
        return self._entry_of[name]

    def record(self, name: str, amax: Tensor) -> None:
        """One micro-batch's amax (0-d). Saying it again, as activation recompute does, changes nothing."""
        entry = self._entry_of[name]
        torch.maximum(entry, amax.to(entry.dtype), out=entry)

    def end_step(self, reduce: Callable[[Tensor], None] | None = None) -> None:
        """Enter the step's maxima of the tensors that were quantized in it.

        Args:
            reduce: takes the FP32 [number of names] maxima to their maximum over ranks, in place.
        """
        self._step.masked_fill_(~torch.isfinite(self._step), 0.0)
        if reduce is not None:
            reduce(self._step)
        moved = torch.cat([self._step[:, None], self._history[:, :-1]], dim=1)
        torch.where(self._step[:, None] >= 0, moved, self._history, out=self._history)
        self.drop_step()
        torch.amax(self._history, dim=1, out=self._largest)

    def drop_step(self) -> None:
        """Forget the step's maxima."""
        self._step.fill_(_NONE)

    def state_dict(self) -> dict[str, Tensor]:
        """Name -> FP32 [length], newest first; for a checkpoint between two steps."""
        return {name: self._history[i].clone() for name, i in self._index.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> list[str]:
        """Take over saved histories, cut or zero-filled to this length.

        Returns:
            Names without a saved history, which start anew (a linear that was in another format when the checkpoint
            was written).
        """
        self._history.zero_()
        for name, i in self._index.items():
            if name in state:
                saved = state[name][: self._history.shape[1]]
                self._history[i, : len(saved)].copy_(saved)
        torch.amax(self._history, dim=1, out=self._largest)
        return [name for name in self._index if name not in state]
