"""Share of the Mamba scan in a training step on a CPU, as a table. Run: python -m tests.benchmarks.scan_share [MODEL]

One step is forward and backward of one micro-batch with BF16 linears (FP32 products). Step and parts are timed by turns
in one run, so that other load on the machine weighs on both; medians are printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch.distributed as dist
import yaml
from megatron.core import parallel_state

from models.config import ModelConfig
from models.hybrid import build_model
from models.mamba import CPU_DECAY_ELEMENTS, MambaWeights, torch_core
from models.megatron_cpu import megatron_device
from models.scan import chunked_scan
from models.shapes import MAMBA, block_letters, mamba_conv_channels, mamba_in_proj_width
from tests.models.plain_linears import PLAIN

CONFIGS = Path(__file__).parents[2] / "configs" / "model"


def step(config: ModelConfig, micro_batch: int, sequence: int) -> Callable[[], None]:
    """Forward and backward of the whole model."""
    model = build_model(config, PLAIN, sequence_length=sequence, seed=1)
    tokens = torch.randint(0, config.vocab_size, (micro_batch, sequence + 1))

    def run() -> None:
        with megatron_device():
            model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous()).mean().backward()
        model.zero_grad()

    return run


def core(config: ModelConfig, micro_batch: int, sequence: int) -> Callable[[], None]:
    """Convolution, scan and gate of one block, forward and backward."""
    heads, channels = config.mamba_num_heads, mamba_conv_channels(config)
    projected = torch.randn(sequence, micro_batch, mamba_in_proj_width(config)).bfloat16()
    vectors = [torch.randn(*shape) for shape in ((channels, 1, 4), (channels,), (heads,), (heads,), (heads,))]
    inputs = [tensor.requires_grad_() for tensor in (projected, *vectors)]
    sizes = (config.mamba_head_dim, config.mamba_state_dim, config.mamba_num_groups, config.mamba_chunk_size)
    gradient = torch.randn(sequence, micro_batch, heads * config.mamba_head_dim).bfloat16()
    return lambda: torch.autograd.grad(torch_core(projected, MambaWeights(*vectors, *sizes)), inputs, gradient)  # type: ignore[return-value]


def scan(config: ModelConfig, micro_batch: int, sequence: int) -> Callable[[], None]:
    """The scan of one block alone, in the pieces that a CPU takes, forward and backward."""
    heads, head_dim = config.mamba_num_heads, config.mamba_head_dim
    piece = min(micro_batch, max(1, CPU_DECAY_ELEMENTS // (sequence * heads * config.mamba_chunk_size)))
    group = (sequence, piece, config.mamba_num_groups, config.mamba_state_dim)
    x, gradient = torch.randn(2, sequence, piece, heads, head_dim)
    dt, A, D = torch.rand(sequence, piece, heads) / 10, -torch.rand(heads) * 16, torch.ones(heads)
    inputs = [t.requires_grad_() for t in (x, dt, A, torch.randn(group), torch.randn(group), D)]

    def run() -> None:
        for _ in range(micro_batch // piece):
            torch.autograd.grad(chunked_scan(*inputs, config.mamba_chunk_size), inputs, gradient)

    return run


def medians(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median wall time in ms of every run, taken by turns after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print one row a chunk size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="quickstart")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunks", type=int, nargs="*", default=[16, 32, 64])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    values = yaml.safe_load((CONFIGS / f"{arguments.model}.yaml").read_text())
    shape = (arguments.micro_batch, arguments.sequence)
    print(f"{arguments.model}: micro-batch {shape[0]}, sequence {shape[1]}, {arguments.threads} threads, CPU, ms")
    print(f"{'chunk':>6} {'step':>8} {'scan':>8} {'share':>7} {'conv+scan+gate':>15} {'share':>7}")
    for chunk in arguments.chunks:
        config = ModelConfig(**values | {"mamba_chunk_size": chunk})
        blocks = block_letters(config).count(MAMBA)
        runs = {"step": step(config, *shape), "scan": scan(config, *shape), "core": core(config, *shape)}
        ms = medians(runs, arguments.rounds)
        whole, scans, cores = ms["step"], blocks * ms["scan"], blocks * ms["core"]
        print(f"{chunk:>6} {whole:>8.0f} {scans:>8.0f} {scans / whole:>7.1%} {cores:>15.0f} {cores / whole:>7.1%}")


if __name__ == "__main__":
    main()
