"""Trains as a user does, or with one number of one activation moved to its neighbour in BF16. Started by `launches`.

Among the overrides of a job, `nudge=N` moves the N-th choice of an element of what the first block gives to the
residual stream, in the first micro-batch of the first step. No layout can be closer to one process than such a run is:
to split a sum is to move many numbers so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nvfp4_train import trainer
from nvfp4_train.compose import compose
from nvfp4_train.layout import check_run
from nvfp4_train.precision.runtime import Call
from nvfp4_train.precision.three_gemms import ThreeGemms
from tests.parallel.worker import main

NUDGED = "decoder.layers.0.mixer.out_proj"
_OPTION = "nudge="


@contextmanager
def nudged(choice: int) -> Iterator[list[tuple[float, float]]]:
    """Within, one number of one activation is its neighbour away from zero; yields what it was and became."""
    real, done = ThreeGemms.forward, list[tuple[float, float]]()

    def forward(self: ThreeGemms, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, *rest: Any) -> Any:
        y, kept = real(self, x, weight, bias, call, *rest)
        if (self.name, call.step, call.microbatch) == (NUDGED, 0, 0):
            place = torch.randint(y.numel(), (1,), generator=torch.Generator().manual_seed(choice))
            before = float(y.view(-1)[place])
            y.view(-1).view(torch.int16)[place] += 1
            done.append((before, float(y.view(-1)[place])))
        return y, kept

    ThreeGemms.forward = forward  # type: ignore[method-assign]
    try:
        yield done
    finally:
        ThreeGemms.forward = real  # type: ignore[method-assign]


def run(overrides: list[str], world_size: int) -> dict[str, Any]:
    """Exit code, and what was moved."""
    choices = [int(text.removeprefix(_OPTION)) for text in overrides if text.startswith(_OPTION)]
    config = compose([text for text in overrides if not text.startswith(_OPTION)])
    check_run(config, world_size)
    if not choices:
        return {"code": int(trainer.train(config)), "moved": []}
    with nudged(*choices) as moved:
        return {"code": int(trainer.train(config)), "moved": moved}


if __name__ == "__main__":
    main(run)
