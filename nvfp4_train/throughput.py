"""How fast a step was: tokens, operations and share of the card's peak; and how much memory was needed so far."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from models.shapes import Flops, flops_per_token
from nvfp4_train.cards import bf16_peak, tensor_cores, weighted_peak
from nvfp4_train.config import RunConfig
from nvfp4_train.distributed import World
from nvfp4_train.layout import tokens_per_step
from nvfp4_train.metrics import Metrics
from nvfp4_train.precision.assignment import LinearPrecision
from nvfp4_train.precision.phases import Passes
from nvfp4_train.setup import device_name


@dataclass(frozen=True)
class Throughput:
    """What a step of this run is worth.

    Attributes:
        tokens_per_step: of the global batch.
        flops: operations of a token's forward pass; training is three times that, recompute is not counted.
        world_size: GPUs that share the work.
        device: name of the card, `cpu` without one.
        assignments: what was decided for every linear.
        emulated: whether all products run on BF16 tensor cores, whatever the recipe.
    """

    tokens_per_step: int
    flops: Flops
    world_size: int
    device: str
    assignments: tuple[LinearPrecision, ...]
    emulated: bool

    @cached_property
    def _peaks(self) -> dict[Passes, float | None]:
        """Weighted peak by the passes that were asked for so far."""
        return {}

    def weighted_peak(self, passes: Passes) -> float | None:
        """TFLOP/s of a card whose tensor cores are all busy with this run's formats; None for an unknown card."""
        if passes not in self._peaks:
            work = multiplied_in(self.flops, () if self.emulated else self.assignments, passes)
            self._peaks[passes] = weighted_peak(self.device, work)
        return self._peaks[passes]

    def metrics(self, seconds: float, passes: Passes) -> Metrics:
        """Speed of a step: TFLOP/s on a GPU alone, and its share of both peaks on known cards.

        `throughput/mfu` is of the dense BF16 peak whatever the recipe, `throughput/mfu_weighted` of what the formats
        that multiplied would allow: FP8 tensor cores count twice.
        """
        tokens_per_s = self.tokens_per_step / seconds
        found: Metrics = {"time/step_s": seconds, "throughput/tokens_per_s": tokens_per_s}
        if self.device != "cpu":
            rate = tokens_per_s * self.flops.training / self.world_size / 1e12
            found["throughput/tflops_per_gpu"] = rate
            dense, weighted = bf16_peak(self.device), self.weighted_peak(passes)
            if dense is not None and weighted is not None:
                found |= {"throughput/mfu": rate / dense, "throughput/mfu_weighted": rate / weighted}
        return found

    def describe(self, passes: Passes) -> list[str]:
        """A line on the peaks that MFU is a share of, where there are any."""
        dense, weighted = bf16_peak(self.device), self.weighted_peak(passes)
        if dense is None or weighted is None:
            return []
        peaks = f"{dense:,.0f} TFLOP/s, the dense BF16 peak of {self.device}, and of {weighted:,.0f} TFLOP/s"
        return [f"MFU: of {peaks}, that of the formats that multiply"]


def throughput_of(
    config: RunConfig, world: World, assignments: tuple[LinearPrecision, ...], *, emulated: bool
) -> Throughput:
    """What a step of the run `config` is worth on this rank's device."""
    flops = flops_per_token(config.model, config.data.sequence_length)
    device = device_name(world.device)
    return Throughput(tokens_per_step(config), flops, world.size, device, assignments, emulated)


def multiplied_in(flops: Flops, assignments: tuple[LinearPrecision, ...], passes: Passes) -> Mapping[str, int]:
    """Training operations of a token by the tensor cores they run on; what no assignment names runs in BF16."""
    work: Counter[str] = Counter(bf16=flops.training)
    for linear in assignments:
        for gemm, formats in linear.gemm_formats.items():
            if (passes.forward if gemm == "fprop" else passes.backward) == "recipe":
                work["bf16"] -= flops.linears[linear.name]
                work[tensor_cores(formats)] += flops.linears[linear.name]
    return work


def peak_memory_gib() -> float:
    """Most memory so far: allocated on the GPU, or resident in the process without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
