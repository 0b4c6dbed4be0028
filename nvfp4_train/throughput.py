"""How fast a step was: tokens, operations and share of the card's peak; and how much memory was needed so far."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from nvfp4_train.cards import bf16_peak
from nvfp4_train.metrics import Metrics


@dataclass(frozen=True)
class Throughput:
    """What a step of this run is worth.

    Attributes:
        tokens_per_step: of the global batch.
        flops_per_token: forward and backward, a multiply and an add counted as two; recompute is not counted.
        world_size: GPUs that share the work.
        device: name of the card, `cpu` without one.
    """

    tokens_per_step: int
    flops_per_token: int
    world_size: int
    device: str

    def metrics(self, seconds: float) -> Metrics:
        """Speed of a step. TFLOP/s on a GPU alone; MFU, of the dense BF16 peak whatever the recipe, on known cards."""
        tokens_per_s = self.tokens_per_step / seconds
        found: Metrics = {"time/step_s": seconds, "throughput/tokens_per_s": tokens_per_s}
        if self.device != "cpu":
            found["throughput/tflops_per_gpu"] = tokens_per_s * self.flops_per_token / self.world_size / 1e12
            peak = bf16_peak(self.device)
            if peak is not None:
                found["throughput/mfu"] = found["throughput/tflops_per_gpu"] / peak
        return found


def peak_memory_gib() -> float:
    """Most memory so far: allocated on the GPU, or resident in the process without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
