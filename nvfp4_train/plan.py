"""`python -m nvfp4_train.plan [overrides] [--json] [--recipes]`: what a run would be, untrained. No torch here."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from data.quiet import quiet
from models.shapes import (
    block_letters,
    count_block_parameters,
    count_parameters,
    flops_per_token,
    linear_shapes,
    padded_vocab_size,
)
from nvfp4_train import cli
from nvfp4_train.cards import bf16_peak
from nvfp4_train.config import RunConfig
from nvfp4_train.exits import guarded
from nvfp4_train.layout import model_ranks, tokens_per_step
from nvfp4_train.memory import Machine, by_recompute, memory
from nvfp4_train.overrides import find_groups
from nvfp4_train.precision.assignment import LinearPrecision, assign
from nvfp4_train.precision.backends import HOPPER, native_problem, never_runs
from nvfp4_train.precision.phases import resolve
from nvfp4_train.precision.recipes import RecipeListing, list_recipes
from nvfp4_train.precision.report import report, summary

CARDS = ("H200", "GB200", "GB300")
MFU = 0.4  # of the dense BF16 peak, stated beside every time that follows from it
LETTERS = {"M": "Mamba-2", "*": "attention", "-": "feed-forward"}


def plan(config: RunConfig) -> dict[str, Any]:
    """Everything that is known of a run before it starts, ready for JSON. Sizes are in bytes, times in hours."""
    model, length = config.model, config.data.sequence_length
    flops = flops_per_token(model, length)
    per_step = tokens_per_step(config)
    assignments = assign(config.precision, linear_shapes(model), config.parallel.tensor)
    schedule = resolve(config.precision.phases, config.steps, per_step)
    return {
        "name": config.name,
        "steps": config.steps,
        "tokens_per_step": per_step,
        "tokens": per_step * config.steps,
        "parameters": _parameters(config),
        "flops_per_token": {
            "forward": flops.forward,
            "training": flops.training,
            "forward_by_part": _flops_by_part(config),
        },
        "memory_per_rank": _memory(config, assignments),
        "time": _time(flops.training * per_step * config.steps),
        "precision": report(config.precision, assignments, flops.training, schedule),
        "warnings": _warnings(config),
    }


def layout(config: RunConfig, assignments: Sequence[LinearPrecision], world_size: int) -> dict[str, Any]:
    """How the run lies on `world_size` processes, for JSON; every pipeline stage is built, without its memory."""
    with quiet():  # torch and Megatron, which nothing else here needs
        from nvfp4_train.dry_run import dry_run

        stages = dry_run(config, assignments, world_size)
    replicas = world_size // model_ranks(config.parallel)
    return {
        "world_size": world_size,
        "replicas": replicas,
        "micro_batches": config.data.global_batch // (config.data.micro_batch * replicas),
        "stages": [asdict(stage) | {"total": stage.memory.total} for stage in stages],
    }


def _layout_lines(found: dict[str, Any]) -> list[str]:
    first = (
        f"layout      {found['world_size']:,} processes: {found['replicas']:,} replicas, "
        f"{found['micro_batches']:,} micro-batches a step each"
    )
    lines = [first]
    for number, stage in enumerate(found["stages"]):
        formats = ", ".join(f"{count} {name}" for name, count in stage["linears"].items())
        parts = {name: size for name, size in stage["memory"].items() if name != "optimizer_step"}
        lines.append(
            f"            stage {number}: {' | '.join(stage['blocks'])}, {stage['parameters']:,} parameters a rank, "
            f"linears {formats}; {_gib(stage['total'])} a GPU: "
            + ", ".join(f"{name.replace('_', ' ')} {_gib(size)}" for name, size in parts.items())
        )
    return lines


def _warnings(config: RunConfig) -> list[str]:
    """What can be planned but is refused by `train`, whatever machine it runs on."""
    backend = config.precision.backend
    problem = never_runs(config.precision, assign(config.precision, linear_shapes(config.model)))
    return [] if problem is None else [f"train refuses precision.backend={backend} on any card: {problem}"]


def _parameters(config: RunConfig) -> dict[str, Any]:
    model = config.model
    vocabulary = padded_vocab_size(model) * model.hidden_size
    counts = Counter(block_letters(model))
    return {
        "total": count_parameters(model),
        "embedding": vocabulary,
        "output_layer": 0 if model.tie_embeddings else vocabulary,
        "final_norm": model.hidden_size,
        "blocks": {
            letter: {"count": count, "each": count_block_parameters(model, letter)} for letter, count in counts.items()
        },
    }


def _flops_by_part(config: RunConfig) -> dict[str, int]:
    """Forward operations of a token: linears by role, then what is no linear."""
    flops = flops_per_token(config.model, config.data.sequence_length)
    parts: Counter[str] = Counter()
    for shape in linear_shapes(config.model):
        parts[shape.role] += flops.linears[shape.name]
    return {**parts, "attention": flops.attention, "scan": flops.scan, "convolution": flops.convolution}


def _memory(config: RunConfig, assignments: Sequence[LinearPrecision]) -> dict[str, Any]:
    """Bytes on a GPU that holds the whole model; activations of one micro-batch for each kind of recompute."""
    kernels = "torch" if config.model.kernels == "torch" else "mamba_ssm"
    fp8 = config.precision.backend in ("auto", "native") and native_problem(config.precision, HOPPER) is None
    machine = Machine(cuda=True, kernels=kernels, native=fp8)
    tokens = config.data.micro_batch * config.data.sequence_length
    found = memory(config.model, assignments, tokens, machine)
    return {
        "machine": f"one GPU with the whole model, Mamba kernels {kernels}",
        "micro_batch_tokens": tokens,
        "recompute": config.model.recompute,
        "parts": asdict(found),
        "total": found.total,
        "activations_by_recompute": by_recompute(config.model, assignments, tokens, machine),
    }


def _time(operations: int) -> list[dict[str, Any]]:
    """GPU hours on each card that we have a peak for, at the stated MFU."""
    found = []
    for card in CARDS:
        peak = bf16_peak(card)
        assert peak is not None, f"no peak for {card}"
        hours = operations / (peak * 1e12 * MFU) / 3600
        found.append({"card": card, "bf16_peak_tflops": peak, "mfu": MFU, "gpu_hours": hours})
    return found


def text(planned: dict[str, Any]) -> str:
    """A plan for people."""
    parameters, flops, needed = planned["parameters"], planned["flops_per_token"], planned["memory_per_rank"]
    blocks = [
        f"{found['count']} x {LETTERS[letter]} of {found['each']:,}" for letter, found in parameters["blocks"].items()
    ]
    parts = {name: size for name, size in needed["parts"].items() if name != "optimizer_step"}
    modes = ", ".join(f"{mode} {_gib(size)}" for mode, size in needed["activations_by_recompute"].items())
    hours = ", ".join(f"{found['card']} {found['gpu_hours']:,.1f}" for found in planned["time"])
    lines = [
        f"{planned['name']}: {planned['steps']:,} steps of {planned['tokens_per_step']:,} tokens, "
        f"{planned['tokens']:.3g} tokens in all",
        f"parameters  {parameters['total']:,}: {', '.join(blocks)}, embedding {parameters['embedding']:,}, "
        f"output layer {parameters['output_layer']:,}",
        f"FLOPs       {flops['training']:.4g} a token in training, {flops['forward']:.4g} forward: "
        + ", ".join(
            f"{name} {100 * size / flops['forward']:.1f}%" for name, size in flops["forward_by_part"].items() if size
        ),
        f"memory      {_gib(needed['total'])} a rank ({needed['machine']}; libraries not counted): "
        + ", ".join(f"{name.replace('_', ' ')} {_gib(size)}" for name, size in parts.items()),
        f"            activations of {needed['micro_batch_tokens']:,} tokens by model.recompute: {modes}",
        f"GPU hours   at {MFU:.0%} of the dense BF16 peak: {hours}",
        *(_layout_lines(planned["layout"]) if "layout" in planned else []),
        *summary(planned["precision"]),
        *(f"warning: {warning}" for warning in planned["warnings"]),
    ]
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def recipes(config_dirs: Sequence[str]) -> list[RecipeListing]:
    """The recipes of `configs/` and of folders of the user's own."""
    return [recipe for folder in find_groups(config_dirs).folders for recipe in list_recipes(folder)]


def recipes_text(listed: Sequence[RecipeListing]) -> str:
    """One line for each recipe: name, what it is, where it was published."""
    width = max(len(recipe.name) for recipe in listed) + 2
    return "\n".join(f"{recipe.name:<{width}}{recipe.description} [{recipe.source}]" for recipe in listed)


def _show(config: RunConfig, as_json: bool, world_size: int | None) -> None:
    planned = plan(config)
    if world_size is not None:
        assignments = assign(config.precision, linear_shapes(config.model), config.parallel.tensor)
        planned["layout"] = layout(config, assignments, world_size)
    print(json.dumps(planned, indent=1) if as_json else text(planned))


def _main(argv: Sequence[str] | None) -> int | None:
    arguments = cli.parse_arguments("plan", argv)
    if "recipes" not in arguments.flags:
        as_json, world_size = "json" in arguments.flags, arguments.numbers.get("world")
        return cli.execute(arguments, lambda config: _show(config, as_json, world_size))
    listed = recipes(arguments.config_dirs)
    if "json" in arguments.flags:
        print(json.dumps([recipe._asdict() | {"path": str(recipe.path)} for recipe in listed], indent=1))
    else:
        print(recipes_text(listed))
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return guarded(lambda: _main(argv))


if __name__ == "__main__":
    sys.exit(main())
