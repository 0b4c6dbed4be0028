"""`python -m nvfp4_train.evaluate RUN`: scores a checkpoint on the run's own validation samples."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.quiet import quiet
from nvfp4_train.checkpoints import files as checkpoint_files
from nvfp4_train.checkpoints.files import CheckpointError
from nvfp4_train.config import ConfigError, ParallelConfig, RunConfig
from nvfp4_train.exits import ExitCode, guarded
from nvfp4_train.precision.config import PrecisionConfig

Say = Callable[[str], None]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="nvfp4_train.evaluate", description="Scores a checkpoint: nats a token and bits a byte of held-out text."
    )
    made.add_argument("run", metavar="RUN", type=Path, help="run folder")
    made.add_argument("--step", metavar="N", type=int, help="step of the checkpoint; by default the newest whole one")
    made.add_argument("--precision", metavar="NAME", help="recipe to score in; by default the run's own")
    made.add_argument(
        "--config-dir", "-cd", metavar="DIR", action="append", default=[], help="where DIR/precision/NAME.yaml may be"
    )
    made.add_argument("--json", action="store_true", help="print JSON alone")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    arguments = parser().parse_args(argv)
    return guarded(lambda: run(arguments))


def run(arguments: argparse.Namespace) -> ExitCode:
    """Find the checkpoint, score it, print."""

    def say(line: str) -> None:
        print(line, file=sys.stderr if arguments.json else sys.stdout, flush=True)

    from nvfp4_train.run_records import load_config

    config = replace(load_config(arguments.run), parallel=ParallelConfig())
    if arguments.precision is not None:
        config = replace(config, precision=recipe_for(config, arguments.precision, arguments.config_dir))
    if not config.evaluation.sequences:
        raise ConfigError(f"{arguments.run}: has evaluation.sequences=0, so no validation samples to score.")
    path = choose_checkpoint(arguments.run, arguments.step, say)
    result = {"run": str(arguments.run), "precision": config.precision.name, **score(config, path, say)}
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print("\n" + "\n".join(f"{name:<18} {_written(value)}" for name, value in result.items()))
    return ExitCode.DONE


def recipe_for(config: RunConfig, name: str, config_dirs: Sequence[str] = ()) -> PrecisionConfig:
    """The recipe `name` as it would be in the run's experiment, which says what stays in BF16 of a model of its own.

    The experiment is the one that the run is named after; a run of another name has the recipe's defaults.
    """
    from nvfp4_train.compose import compose_precision
    from nvfp4_train.overrides import find_groups

    known = config.name in find_groups(config_dirs).options["experiment"]
    return compose_precision(name, [f"experiment={config.name}"] if known else [], config_dirs)


def _written(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def choose_checkpoint(run: Path, step: int | None, say: Say) -> Path:
    """The checkpoint of `step`, or the newest whole one.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    root = run / "checkpoints"
    if step is None:
        newest, problems = checkpoint_files.newest_whole(root)
        for passed_over in problems:
            say(f"passed over {passed_over}")
        if newest is None:
            raise CheckpointError(f"{run} has no checkpoint yet")
        return newest
    path = checkpoint_files.step_folder(root, step)
    if not path.is_dir():
        steps = ", ".join(map(str, checkpoint_files.saved_steps(root))) or "none"
        raise CheckpointError(f"--step {step}: {root} has no checkpoint of that step; there are: {steps}")
    problem = checkpoint_files.damage(path)
    if problem is not None:
        raise CheckpointError(f"--step {step}: {path}: {problem}. Name another step")
    return path


def score(config: RunConfig, path: Path, say: Say) -> dict[str, Any]:
    """Step, validation loss, bits a byte and samples of the checkpoint at `path`, scored in one process."""
    with quiet():  # a warning for every optional library that is not installed
        from nvfp4_train.checkpoints import state as checkpoint
        from nvfp4_train.distributed import process_groups
        from nvfp4_train.evaluation import validation_metrics
        from nvfp4_train.layout import choose_backend
        from nvfp4_train.setup import build_quantized_model, check_same_data, compute_capability, open_datasets
    config = replace(config, logging=replace(config.logging, health_every=0))  # of training steps
    with process_groups(config.parallel, config.seed) as world:
        say(choose_backend(config, compute_capability(world.device)).line(config.precision))
        datasets = open_datasets(config, say)
        check_same_data(checkpoint_files.read_header(path), datasets, whole=False)
        quantized = build_quantized_model(config, world, say)
        loaded = checkpoint.load_weights(path, quantized.chunks, quantized.runtime)
        if loaded.new_histories:
            say(f"delayed scaling: {len(loaded.new_histories)} tensors have no amax history here and are scaled by 1")
        quantized.runtime.passes = quantized.passes.at(max(1, loaded.header.step))
        found = validation_metrics(quantized.chunks, datasets, config.data, quantized.runtime, world)
    return {
        "step": loaded.header.step,
        **found,
        "samples": sum(source.validation_samples for source in datasets.sources),
    }


if __name__ == "__main__":
    sys.exit(main())
