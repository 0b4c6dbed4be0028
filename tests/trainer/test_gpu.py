"""An update on a CUDA device: what it makes of the summed gradients."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_kernel_equals_torchs_adamw() -> None:
    from tests.trainer.fused_adam_checks import check_updates

    check_updates("cuda")


def test_an_update_takes_the_gradients_times_its_factor(single_process: None) -> None:
    from nvfp4_train.compose import compose
    from nvfp4_train.distributed import process_groups
    from nvfp4_train.optimizer import inner_optimizers, update
    from tests.benchmarks.training_step import TrainingStep

    config = compose(["experiment=quickstart", "precision=bf16"])
    factor = 0.37 / 4096
    with process_groups(config.parallel, config.seed) as world:
        step = TrainingStep(config, world, warm_up=1)
        parameters = [p for p in step.chunks[0].module.parameters() if p.numel() > 1]
        (inner,) = inner_optimizers(step.optimizer)
        before = [inner.state[p]["exp_avg"].clone() for p in parameters]
        for parameter in parameters:
            parameter.main_grad.normal_()  # type: ignore[attr-defined]
        gradients = [p.main_grad.clone() for p in parameters]  # type: ignore[attr-defined]
        update(step.optimizer, step.chunks, factor)
        for parameter, old, gradient in zip(parameters, before, gradients, strict=True):
            expected = old + (1 - config.optimizer.beta1) * (gradient.double() * factor - old)
            torch.testing.assert_close(inner.state[parameter]["exp_avg"].double(), expected, rtol=1e-5, atol=1e-9)
