"""Delayed scaling: a tensor's scale follows the largest amax of the steps before, so it is known before the tensor is.

One entry a step and tensor: the maximum over the step's micro-batches (and over ranks, through `reduce`). An amax that
is not finite is not entered: it would blind the scale for as long as the history is long, and the step that saw it is
skipped anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


class AmaxHistories:
    """Histories of the tensors named at construction, newest entry first.

    Args:
        names: `<linear>.<input|weight|gradient>`.
        length: entries kept of each.
        device: where the tensors live.
    """

    def __init__(self, names: Sequence[str], length: int, device: torch.device) -> None:
        self._index = {name: i for i, name in enumerate(names)}
        self._history = torch.zeros(len(names), length, device=device)
        self._largest = torch.zeros(len(names), device=device)
        self._step = torch.zeros(len(names), device=device)
        self._recorded: set[int] = set()

    def amax(self, name: str) -> Tensor:
        """Largest entry of `name`, FP32 0-d: 0 (which quantizers scale by 1) before the first."""
        return self._largest[self._index[name]]

    def record(self, name: str, amax: Tensor) -> None:
        """One micro-batch's amax (0-d). Saying it again, as activation recompute does, changes nothing."""
        i = self._index[name]
        self._recorded.add(i)
        entry = self._step[i]
        torch.maximum(entry, amax.to(entry.dtype), out=entry)

    def recorded(self) -> frozenset[int]:
        """Which tensors were quantized in this step."""
        return frozenset(self._recorded)

    def recorded_again(self, recorded: frozenset[int]) -> None:
        """The recording of these amaxes was replayed on the device."""
        self._recorded |= recorded

    def end_step(self, reduce: Callable[[Tensor], None] | None = None) -> None:
        """Enter the step's maxima of the tensors that were quantized in it.

        Args:
            reduce: takes the FP32 [number of names] maxima to their maximum over ranks, in place.
        """
        if not self._recorded:
            return
        self._step.masked_fill_(~torch.isfinite(self._step), 0.0)
        if reduce is not None:
            reduce(self._step)
        rows = torch.tensor(sorted(self._recorded), device=self._step.device)
        self._history[rows] = torch.cat([self._step[rows, None], self._history[rows, :-1]], dim=1)
        self.drop_step()
        self._largest.copy_(self._history.amax(dim=1))

    def drop_step(self) -> None:
        """Forget the step's maxima."""
        self._step.zero_()
        self._recorded.clear()

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
        self._largest.copy_(self._history.amax(dim=1))
        return [name for name in self._index if name not in state]
