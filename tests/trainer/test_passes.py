"""Loss and gradients of a step: over tokens, whatever the micro-batches; recompute and fusion; norms and decay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from models.hybrid import no_weight_decay
from models.megatron_cpu import megatron_device
from nvfp4_train.config import OptimizerConfig, ParallelConfig
from nvfp4_train.distributed import World, process_groups
from nvfp4_train.gradients import (
    GradientNorm,
    first_bad_gradient,
    first_bad_output,
    named_parameters,
    start_gradients,
)
from nvfp4_train.optimizer import build_optimizer, describe_groups, set_learning_rate, wrap_data_parallel
from nvfp4_train.passes import Batch, run_micro_batches
from nvfp4_train.precision.phases import Passes
from nvfp4_train.setup import build_quantized_model
from tests.trainer.conftest import Make

VOCABULARY = 257


@pytest.fixture
def world(single_process: None) -> Iterator[World]:
    with process_groups(ParallelConfig(), 1) as found:
        yield found


class Step:
    """A tiny model that is asked for the gradients of one step."""

    def __init__(self, make: Make, world: World, precision: str = "bf16", *overrides: str) -> None:
        self.config = make(precision, *overrides)
        self.world = world
        built = build_quantized_model(self.config, world, lambda line: None)
        (self.model,), self.runtime = built.chunks, built.runtime
        (self.parallel_model,) = wrap_data_parallel([self.model], ParallelConfig())

    def __call__(self, batches: list[Batch], step: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
        with megatron_device():
            start_gradients([self.parallel_model])
        self.runtime.begin_step(step, Passes())
        loss = run_micro_batches([self.parallel_model], batches, self.runtime, self.world, training=True)
        self.runtime.end_step()
        share = 1 / max(1, int(loss.tokens))
        return loss.mean, {name: p.main_grad * share for name, p in named_parameters([self.model])}


def batch(seed: int, rows: int = 2, valid: int | None = None) -> Batch:
    """`valid` of the rows * 64 tokens count, the first ones."""
    tokens = torch.randint(0, VOCABULARY, (rows, 65), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(rows * 64)
    if valid is not None:
        mask[valid:] = 0
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask.view(rows, 64)}


def test_loss_is_the_sum_over_all_valid_tokens_by_their_number(make: Make, world: World) -> None:
    step = Step(make, world)
    few, many = batch(1, valid=10), batch(2, valid=128)
    alone_few, alone_many = step([few])[0], step([many])[0]
    assert alone_few != pytest.approx(alone_many, rel=1e-3)
    loss, gradients = step([few, many])
    assert loss == pytest.approx((10 * alone_few + 128 * alone_many) / 138, rel=1e-6)
    whole = {name: torch.cat([few[name], many[name]]) for name in few}
    loss_whole, gradients_whole = step([whole])
    assert loss_whole == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, gradients_whole[name], rtol=2e-2, atol=2e-4, msg=name)


def test_no_valid_token_gives_zero_loss_and_zero_gradients(make: Make, world: World) -> None:
    loss, gradients = Step(make, world)([batch(1, valid=0), batch(2, valid=0)])
    assert loss == 0.0
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("precision", ["nvfp4", "fp8_delayed"])
def test_recompute_changes_no_bit(precision: str, make: Make, world: World) -> None:
    found = []
    for recompute in ("none", "full"):
        step = Step(make, world, precision, f"model.recompute={recompute}")
        steps = [step([batch(1), batch(2)], 0), step([batch(3), batch(4)], 1)]
        found.append((steps, step.runtime.state_dict()))
    (plain, histories), (again, histories_again) = found
    for (loss, gradients), (loss_again, gradients_again) in zip(plain, again, strict=True):
        assert loss == loss_again
        assert all(torch.equal(gradient, gradients_again[name]) for name, gradient in gradients.items())
    assert all(torch.equal(history, histories_again[name]) for name, history in histories.items())
    assert bool(histories) == (precision == "fp8_delayed")


def test_gradient_fusion_changes_no_bit(make: Make, world: World) -> None:
    batches = [batch(1), batch(2), batch(3)]
    fused = Step(make, world, "nvfp4", "optimizer.fuse_wgrad=true")(batches)[1]
    plain = Step(make, world, "nvfp4", "optimizer.fuse_wgrad=false")(batches)[1]
    assert all(torch.equal(gradient, plain[name]) for name, gradient in fused.items())
    assert any(gradient.any() for gradient in fused.values())


def test_a_tied_embedding_gets_both_gradients(make: Make, world: World) -> None:
    embedding = "embedding.word_embeddings.weight"
    batches = [batch(1), batch(2)]
    untied = Step(make, world, "nvfp4")
    with torch.no_grad():
        untied.model.output_layer.weight.copy_(untied.model.embedding.word_embeddings.weight)
    separate = untied(batches)[1]
    tied = Step(make, world, "nvfp4", "model.tie_embeddings=true")(batches)[1]
    assert "output_layer.weight" not in tied
    both = separate[embedding] + separate["output_layer.weight"]
    torch.testing.assert_close(tied[embedding], both, rtol=1e-5, atol=1e-7)
    assert separate[embedding].norm() > 0.01 * separate["output_layer.weight"].norm() > 0


def test_quantized_weights_follow_the_weights(make: Make, world: World) -> None:
    """Update, evaluation and a changed weight in between: with the cache as without it."""
    found = []
    for cached in (True, False):
        step = Step(make, world, "nvfp4")
        step.runtime.cache_weights = cached
        losses = []
        for number in range(2):
            losses.append(step([batch(2 * number), batch(2 * number + 1)], number)[0])
            with torch.no_grad():
                for parameter in step.model.parameters():
                    parameter.mul_(1.01)
            step.runtime.weights_changed()
            with step.runtime.evaluating():
                losses.append(
                    run_micro_batches([step.parallel_model], [batch(9)], step.runtime, world, training=False).mean
                )
        found.append(losses)
    assert found[0] == found[1]
    assert len(set(found[0])) == 4


def test_the_norm_is_the_euclidean_norm_of_the_mean_gradient(make: Make, world: World) -> None:
    step = Step(make, world)
    gradients = step([batch(1, valid=100)])[1]
    expected = torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm().item()
    gradient_norm = GradientNorm([step.model])
    assert float(gradient_norm()) / 100 == pytest.approx(expected, rel=1e-6)
    assert first_bad_gradient([step.model]) is None
    for value in (float("nan"), float("inf")):
        step.model.decoder.final_norm.weight.main_grad[0] = value
        assert not gradient_norm().isfinite()
        assert first_bad_gradient([step.model]) == "decoder.final_norm.weight"


def test_a_step_starts_from_nothing_whatever_the_last_one_left(make: Make, world: World) -> None:
    """Old gradients of fused weights stay in the buffer until the first micro-batch writes over them."""
    step = Step(make, world)
    batches = [batch(1), batch(2)]
    first = step(batches)[1]
    for parameter in step.model.parameters():
        parameter.main_grad.fill_(float("nan"))
    again = step(batches, step=1)[1]
    for name, gradient in first.items():
        assert torch.equal(gradient, again[name]), name


def test_the_last_bad_gradient_of_the_model_was_the_first(make: Make, world: World) -> None:
    step = Step(make, world)
    step([batch(1)])
    for block in (0, 1, 2):
        step.model.decoder.layers[block].get_parameter(_norm(block)).main_grad.fill_(float("nan"))
    assert first_bad_gradient([step.model]) == "decoder.layers.2.input_layernorm.weight"


def _norm(block: int) -> str:
    return ["norm.weight", "pre_mlp_layernorm.weight", "input_layernorm.weight"][block]


def test_no_output_is_bad_in_a_sound_model(make: Make, world: World) -> None:
    step = Step(make, world)

    def forward() -> Any:
        with megatron_device(), step.runtime.evaluating():
            return step.model(batch(1)["tokens"], labels=batch(1)["labels"])

    assert first_bad_output([step.model], forward) is None


def test_zero_gradients_move_only_what_decays(make: Make, world: World) -> None:
    step = Step(make, world)
    config = OptimizerConfig(lr=1.0, weight_decay=0.1)
    optimizer = build_optimizer(config, ParallelConfig(), [step.parallel_model])
    before = {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}
    with megatron_device():
        step.parallel_model.zero_grad_buffer()
        set_learning_rate(optimizer, 1.0)
        optimizer.step()
    kept = {name for name, parameter in step.model.named_parameters() if torch.equal(parameter, before[name])}
    for name, parameter in step.model.named_parameters():
        if name not in kept:
            torch.testing.assert_close(parameter, 0.9 * before[name], rtol=1e-6, atol=0)
        assert (name in kept) == no_weight_decay(name, parameter), name
    for leaf in ("A_log", "D", "dt_bias", "conv1d_weight", "conv1d_bias"):
        assert f"decoder.layers.0.mixer.{leaf}" in kept
    assert {name for name in before if "norm" in name} <= kept
    assert "decoder.layers.0.mixer.in_proj.weight" not in kept
    spared = sum(before[name].numel() for name in kept)
    line = describe_groups([step.model], 0.1)
    assert f"none on {spared:,} (A_log, D, conv1d_bias, conv1d_weight, dt_bias, norm)" in line
