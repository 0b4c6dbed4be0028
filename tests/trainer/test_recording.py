"""What a user reads when a pass can't be recorded as a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from nvfp4_train.config import ConfigError
from nvfp4_train.graphs import MicroBatchGraphs


def test_a_pass_that_can_not_be_recorded_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: MicroBatchGraphs) -> torch.cuda.CUDAGraph:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nDevice-side assertions ...")

    monkeypatch.setattr(MicroBatchGraphs, "_record", stopped)
    with pytest.raises(ConfigError, match=r"parallel\.cuda_graphs=never") as refused:
        object.__new__(MicroBatchGraphs)._recorded()
    assert "here: CUDA error: operation not permitted when stream is capturing. Write" in str(refused.value)
