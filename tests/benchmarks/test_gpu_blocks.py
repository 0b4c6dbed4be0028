"""The table of blocks times passes that compute."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from nvfp4_train.distributed import process_groups
from tests.benchmarks.gpu_blocks import blocks, configuration
from tests.trainer.conftest import TINY


def test_each_block_runs_forward_and_backward_alone(single_process: None) -> None:
    small = (*TINY, "experiment=quickstart", "model.pattern=M-*", "data.micro_batch=1", "data.global_batch=1")
    config = configuration("nvfp4", small)
    with process_groups(config.parallel, config.seed) as world:
        found = blocks(config, world)
        assert [letter for letter, _ in found] == ["M", "-", "*"]
        for _, run in found:
            gradient = run()
            assert gradient.isfinite().all()
            assert gradient.float().std() > 0.5  # at least what the residual stream carries, of about 1
            assert torch.equal(run(), gradient)  # with the weights quantized before
