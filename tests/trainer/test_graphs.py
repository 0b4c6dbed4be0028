"""CUDA graphs against the same steps without: losses and weights bit for bit, whatever the recipe and the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nvfp4_train.compose import compose
from nvfp4_train.config import ParallelConfig, RunConfig
from nvfp4_train.distributed import World, process_groups
from nvfp4_train.gradients import named_parameters
from nvfp4_train.precision.phases import Passes
from tests.benchmarks.training_step import TrainingStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 6
SMALL = (
    "experiment=nano",
    "model.pattern=M-*-M-",
    "data.sequence_length=256",
    "data.micro_batch=4",
    "data.global_batch=12",
    "precision.bf16_blocks.last=0",
)
RECIPES = ("bf16", "nvfp4", "fp8_block", "fp8_delayed", "fp8_current", "mxfp4", "nvfp4_four_over_six", "quartet2")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with process_groups(ParallelConfig(), 1) as found:
        yield found


def small(precision: str, *overrides: str) -> RunConfig:
    return compose([*SMALL, f"precision={precision}", *overrides])


def documents(step: TrainingStep) -> None:
    """Three documents in each row, and some masked tokens, in every micro-batch of a step to come."""
    for number, batch in enumerate(step.batches):
        places = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
        batch["documents"] = ((places > 40 + number) + (places > 130)).int()
        batch["loss_mask"][:, 7 * (number + 1) :: 11] = 0


def train(config: RunConfig, world: World, *, apart: bool = False, sampled: int | None = None) -> list[torch.Tensor]:
    """Losses of some steps, and all weights and amax histories after them; tokens change from step to step."""
    step = TrainingStep(config, world, warm_up=0)
    losses = []
    for number in range(STEPS):
        for batch in step.batches:
            batch["tokens"], batch["labels"] = batch["labels"], batch["tokens"].roll(1, 0)
        if apart:
            documents(step)
        step(sample_health=number == sampled)
        losses.append(step.loss)
    weights = [parameter.detach().clone() for _, parameter in named_parameters(step.chunks)]
    return [torch.tensor(losses, dtype=torch.float64), *weights, *step.runtime.state_dict().values()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert torch.equal(found[0], expected[0]), f"losses {found[0].tolist()}, without graphs {expected[0].tolist()}"
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), "weights differ"


@pytest.mark.parametrize("precision", RECIPES)
def test_graphs_change_no_bit(precision: str, world: World) -> None:
    plain = train(small(precision, "parallel.cuda_graphs=never"), world)
    assert plain[0].isfinite().all()
    assert_same(train(small(precision), world), plain)


def test_documents_apart_and_masked_tokens(world: World) -> None:
    plain = train(small("nvfp4", "parallel.cuda_graphs=never"), world, apart=True)
    assert_same(train(small("nvfp4"), world, apart=True), plain)


def test_a_step_whose_health_is_sampled_runs_between_graphs(world: World) -> None:
    plain = train(small("nvfp4", "parallel.cuda_graphs=never"), world, sampled=3)
    assert_same(train(small("nvfp4"), world, sampled=3), plain)


def phases(config: RunConfig, world: World) -> list[torch.Tensor]:
    """As `train`, with a phase of BF16 forward passes within, and amax histories beside the weights."""
    step = TrainingStep(config, world, warm_up=0)
    losses = []
    for passes in (*3 * [Passes()], *3 * [Passes(forward="bf16")], *3 * [Passes()]):
        step(passes=passes)
        losses.append(step.loss)
    weights = [parameter.detach().clone() for _, parameter in named_parameters(step.chunks)]
    return [torch.tensor(losses, dtype=torch.float64), *weights, *step.runtime.state_dict().values()]


@pytest.mark.parametrize("precision", ["nvfp4", "fp8_delayed", "quartet2"])
def test_a_phase_records_anew(precision: str, world: World) -> None:
    plain = phases(small(precision, "parallel.cuda_graphs=never"), world)
    assert_same(phases(small(precision), world), plain)


def test_most_steps_are_replays(world: World) -> None:
    """What the others hang on: from the second step on nothing but graphs runs the passes."""
    step = TrainingStep(small("nvfp4"), world, warm_up=2)
    calls = []
    for module in step.chunks[0].modules():
        module.register_forward_hook(lambda *_: calls.append(1))
    step()
    assert not calls
