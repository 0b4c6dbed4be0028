"""One block of each letter at 12B size on a GPU, forward and backward, as a table of ratios to BF16.

Run: python -m tests.benchmarks.gpu_blocks [RECIPE ...]

Mamba, feed-forward and attention with hidden 5120, on 8192 tokens in one sequence, by the code that trains: the norm
before and the sum along the residual stream belong to a block, weight gradients are written in FP32. Weights are
quantized once before, as in a step of several micro-batches. No block is kept in BF16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from data.quiet import quiet

with quiet():
    from models.shapes import block_letters
    from nvfp4_train.compose import compose
    from nvfp4_train.config import RunConfig
    from nvfp4_train.distributed import World, process_groups
    from nvfp4_train.optimizer import wrap_data_parallel
    from nvfp4_train.precision.phases import Passes
    from nvfp4_train.setup import build_quantized_model
    from tests.benchmarks.card import need_card
    from tests.benchmarks.gpu_linear import milliseconds
    from tests.benchmarks.gpu_step import ALL_QUANTIZED, BLOCKS_12B

RECIPES = ("bf16", "fp8_block", "nvfp4")
ONE_OF_EACH = (*BLOCKS_12B, "model.pattern=M-*", "model.vocab_size=1024", "data.sequence_length=8192",
               "data.micro_batch=1", "data.global_batch=1")  # fmt: skip
BASELINE = "bf16"


def configuration(recipe: str, overrides: Sequence[str] = ONE_OF_EACH) -> RunConfig:
    """Of three blocks in a recipe, all quantized."""
    kept = () if recipe == BASELINE else ALL_QUANTIZED
    return compose([*overrides, f"precision={recipe}", *kept, "deterministic=false"])


def blocks(config: RunConfig, world: World) -> list[tuple[str, Callable[[], torch.Tensor]]]:
    """(letter, forward and backward pass) of each block; a pass gives its input's gradient."""
    quantized = build_quantized_model(config, world, say=lambda text: None)
    wrap_data_parallel(quantized.chunks, config.parallel)  # for the FP32 buffers of weight gradients
    runtime = quantized.runtime
    runtime.begin_step(1, Passes())
    runtime.begin_microbatch(0)
    runtime.observing = False
    shape = (config.data.sequence_length, config.data.micro_batch, config.model.hidden_size)
    x, dy = (torch.randn(shape, device=world.device).bfloat16() for _ in range(2))
    layers = quantized.chunks[0].decoder.layers
    return [(letter, _pass(layer, x, dy)) for letter, layer in zip(block_letters(config.model), layers, strict=True)]


def _pass(layer: Any, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], torch.Tensor]:
    leaf = x.clone().requires_grad_()

    def run() -> torch.Tensor:
        leaf.grad = None
        out = layer(hidden_states=leaf, attention_mask=None)
        (out[0] if isinstance(out, tuple) else out).backward(dy)
        assert leaf.grad is not None
        return leaf.grad

    return run


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"by default {', '.join(RECIPES)}")
    chosen = parser.parse_args(arguments)
    need_card()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms forward and backward, and over {BASELINE}")
    baseline: dict[str, float] = {}
    first = configuration(BASELINE)
    with process_groups(first.parallel, first.seed) as world:
        for recipe in chosen.recipes or RECIPES:
            cells = []
            for letter, run in blocks(configuration(recipe), world):
                run()
                ms = milliseconds(run, 200)
                if recipe == BASELINE:
                    baseline[letter] = ms
                ratio = f"{ms / baseline[letter]:.3f}" if letter in baseline else ""
                cells.append(f"{letter} {ms:7.2f} {ratio:>6}")
            print(f"{recipe:<12} " + "    ".join(cells), flush=True)


if __name__ == "__main__":
    main()
