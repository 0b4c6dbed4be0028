"""An update on a CUDA device: what it makes of the summed gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    factor = torch.tensor(0.37 / 4096, dtype=torch.float64, device="cuda")
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


SMALL_RUN = (
    "experiment=quickstart",
    "model.mamba_head_dim=64",
    "model.mamba_num_heads=8",
    "steps=6",
    "logging.wandb=disabled",
    "evaluation.every=0",
    "evaluation.sequences=0",
)


@pytest.mark.parametrize("graphs", ["never", "auto"])
def test_an_update_is_launched_while_the_passes_still_run(
    graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing between the two waits for the device: not for its stream, and not for an event on it."""
    from nvfp4_train import trainer
    from nvfp4_train.compose import compose
    from nvfp4_train.exits import ExitCode

    passes, update, still_at_work = trainer.run_micro_batches, trainer.update, []

    def long_passes(*arguments: Any, **settings: Any) -> Any:
        loss = passes(*arguments, **settings)
        torch.cuda._sleep(500_000_000)  # cycles: a quarter of a second
        if arguments[2].step > 0:  # the first update draws up its tables of addresses
            torch.cuda.set_sync_debug_mode("error")
        return loss

    def seen(*arguments: Any) -> None:
        update(*arguments)
        torch.cuda.set_sync_debug_mode("default")
        still_at_work.append(not torch.cuda.current_stream().query())

    monkeypatch.setattr(trainer, "run_micro_batches", long_passes)
    monkeypatch.setattr(trainer, "update", seen)
    try:
        overrides = (*SMALL_RUN, "precision=fp8_delayed", f"parallel.cuda_graphs={graphs}", f"run_dir={tmp_path}/run")
        assert trainer.train(compose(list(overrides))) == ExitCode.DONE
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert still_at_work[1:] == [True] * 5


@pytest.mark.parametrize("precision", ["bf16", "fp8_delayed"])
def test_a_step_with_a_bad_gradient_changes_nothing(
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its update was launched before anyone knew: weights, moments, their counts and histories are as before."""
    from nvfp4_train.compose import compose
    from nvfp4_train.exits import ExitCode
    from nvfp4_train.trainer import train
    from tests.trainer.test_trainer import poison, unchanged

    poison(monkeypatch, {4}, "decoder.final_norm.weight")
    seen = unchanged(monkeypatch)
    config = compose([*SMALL_RUN, f"precision={precision}", f"run_dir={tmp_path}/run"])
    assert train(config) == ExitCode.DONE
    trained = (False, False, precision != "fp8_delayed")
    assert seen == [trained] * 3 + [(True, True, True)] + [trained] * 2
    printed = capsys.readouterr().out
    assert "step 4 skipped (1 of 5 in a row)" in printed
    assert "first bad on rank 0: gradient of decoder.final_norm.weight" in printed
