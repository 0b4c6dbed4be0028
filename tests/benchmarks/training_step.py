"""One training step of a configuration, as the trainer makes it, for the tables of step times."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from unittest.mock import patch

import torch

from data.quiet import quiet

with quiet():
    from models.config import ModelConfig
    from models.initialization import initial_values
    from models.megatron_cpu import megatron_device
    from nvfp4_train.config import RunConfig
    from nvfp4_train.distributed import World
    from nvfp4_train.gradients import GradientNorm, start_gradients
    from nvfp4_train.graphs import MicroBatchGraphs
    from nvfp4_train.layout import choose_graphs
    from nvfp4_train.optimizer import build_optimizer, set_learning_rate, update, updated_here, wrap_data_parallel
    from nvfp4_train.outcome import Outcome
    from nvfp4_train.passes import Batch, run_micro_batches
    from nvfp4_train.precision.phases import Passes
    from nvfp4_train.setup import build_quantized_model, compute_capability

RECIPE = Passes()


class TrainingStep:
    """A model in its recipe; each call is one optimizer step on the same random tokens.

    What the trainer does around it (reading data, hashing batches, logging) is left out: the same in every recipe.

    Args:
        config: of the run.
        world: where this process stands.
        warm_up: steps to make at once.
        quick_weights: draw the matrices on the device, for times alone; they are not those of a run.
    """

    def __init__(self, config: RunConfig, world: World, warm_up: int = 2, *, quick_weights: bool = False) -> None:
        with patch("models.hybrid.initialize", _draw_on_device) if quick_weights else nullcontext():
            quantized = build_quantized_model(config, world, say=lambda text: None)
        self.config, self.world = config, world
        self.runtime = quantized.runtime
        self.chunks = wrap_data_parallel(quantized.chunks, config.parallel)
        self.optimizer = build_optimizer(config.optimizer, config.parallel, self.chunks)
        self.gradient_norm = GradientNorm(quantized.chunks, updated_here(self.optimizer))
        graphs, _ = choose_graphs(config, quantized.backend, compute_capability(world.device))
        self.graphs = MicroBatchGraphs(self.chunks[0], self.runtime, world) if graphs else None
        self.batches = random_batches(config, world)
        self.step = 0
        for _ in range(warm_up):
            self()

    def __call__(self, sample_health: bool = False, passes: Passes = RECIPE) -> None:
        """One step; with `sample_health`, health is measured on its first micro-batch and read off."""
        self.runtime.sample_health = sample_health
        self.runtime.begin_step(self.step, passes)
        with megatron_device():
            start_gradients(self.chunks)
        total = run_micro_batches(
            self.chunks, self.batches, self.runtime, self.world, training=True, graphs=self.graphs
        )
        outcome = Outcome(total, self.gradient_norm(), self.config.optimizer.clip, self.world)
        set_learning_rate(self.optimizer, self.config.optimizer.lr)
        update(self.optimizer, self.chunks, outcome.factor)
        self.runtime.weights_changed()
        self.loss, _, skipped = outcome.wait()
        assert not skipped
        self.runtime.end_step()
        if sample_health:
            assert self.runtime.health.metrics()
        self.step += 1


@torch.no_grad()
def _draw_on_device(
    named: Iterable[tuple[str, torch.nn.Parameter]], *, seed: int, config: ModelConfig, rank: int, ranks: int
) -> None:
    """In place of `models.initialization.initialize`, which draws on the CPU: 15 s for a billion parameters."""
    assert ranks == 1, (rank, ranks)
    for name, parameter in named:
        if parameter.dim() == 2:
            parameter.normal_(0.0, config.init_std)
        else:
            parameter.copy_(initial_values(name, tuple(parameter.shape), seed, config))


def random_batches(config: RunConfig, world: World) -> list[Batch]:
    """This rank's micro-batches of one global batch of random tokens, all of them valid."""
    data, generator = config.data, torch.Generator().manual_seed(config.seed + world.data_rank)
    shape = (data.micro_batch, data.sequence_length)
    batches = []
    for _ in range(data.global_batch // (data.micro_batch * world.data_size)):
        text = torch.randint(0, config.model.vocab_size, (shape[0], shape[1] + 1), generator=generator)
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        batch = {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(shape)}
        pinned = torch.cuda.is_available()  # as the loader's are
        batches.append({name: part.pin_memory() if pinned else part for name, part in batch.items()})
    return batches
