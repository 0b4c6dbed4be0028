"""How much each block loses when it alone is quantized: validation loss of a trained BF16 checkpoint with the linears
of one block in a recipe and all others in BF16, less that of BF16 throughout.

Only forward passes are judged: what quantized gradients do shows in training alone. The differences are of the same
sequences, so they are known much better than the loss.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data.quiet import quiet
from models.shapes import linear_shapes, num_blocks
from nvfp4_train.checkpoints import files as checkpoint_files
from nvfp4_train.compose import compose_precision
from nvfp4_train.config import ConfigError, ParallelConfig, RunConfig
from nvfp4_train.evaluate import choose_checkpoint
from nvfp4_train.precision.assignment import LinearPrecision, assign
from nvfp4_train.precision.config import Bf16Blocks, PrecisionConfig, Rule
from nvfp4_train.run_records import load_config

FILE = "sensitivity.csv"


def block_alone(recipe: PrecisionConfig, block: int) -> PrecisionConfig:
    """The recipe in one block, BF16 in all others."""
    rules = (Rule("recipe", match=f"*.layers.{block}.*"), Rule("bf16", match="*"))
    return replace(recipe, bf16_blocks=Bf16Blocks(), recipe_rules=(), rules=rules)


def measure(run: Path, recipe_name: str, sequences: int, say: Callable[[str], None]) -> dict[int, float]:
    """Block -> nats that the validation loss of the BF16 run in the folder `run` rises with that block in the recipe.

    Args:
        sequences: of validation text to score.

    Raises:
        ConfigError: the run was not trained in BF16, or has no checkpoint.
    """
    config = replace(load_config(run), parallel=ParallelConfig())
    if config.precision.name != "bf16":
        raise ConfigError(f"{run}: was trained in {config.precision.name}; sensitivity is measured on a BF16 run.")
    config = replace(config, evaluation=replace(config.evaluation, sequences=sequences))
    recipe = compose_precision(recipe_name)
    shapes = linear_shapes(config.model)
    blocks = range(num_blocks(config.model))
    assignments = [assign(block_alone(recipe, block), shapes) for block in blocks]
    losses = _losses(config, choose_checkpoint(run, None, say), [assign(config.precision, shapes), *assignments])
    return {block: losses[block + 1] - losses[0] for block in blocks}


def _losses(config: RunConfig, path: Path, assignments: list[tuple[LinearPrecision, ...]]) -> list[float]:
    """Validation loss of a checkpoint under each of several assignments, in one process with one model."""
    with quiet():  # a warning for every optional library that is not installed
        from models.hybrid import named_linears
        from nvfp4_train.checkpoints import state as checkpoint
        from nvfp4_train.distributed import process_groups
        from nvfp4_train.evaluation import validation_metrics
        from nvfp4_train.precision.linear import attach
        from nvfp4_train.setup import build_quantized_model, check_same_data, open_datasets

    def silent(line: str) -> None:
        """What a start says is of no interest here."""

    with process_groups(config.parallel, config.seed) as world:
        datasets = open_datasets(config, silent)
        check_same_data(checkpoint_files.read_header(path), datasets, whole=True)
        model = build_quantized_model(config, world, silent)
        checkpoint.load_weights(path, model.chunks, model.runtime)
        linears = {name: linear for chunk in model.chunks for name, linear in named_linears(chunk).items()}
        losses = []
        for one in assignments:
            attach(linears, one, model.runtime)
            losses.append(validation_metrics(model.chunks, datasets, config.data, model.runtime, world)["val/loss"])
    return losses


def to_csv(differences: dict[int, float], letters: str, recipe: str) -> str:
    """`sensitivity.csv`: block, its letter, nats."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["block", "letter", "recipe", "loss_difference"])
    writer.writerows([block, letters[block], recipe, f"{value:.6f}"] for block, value in differences.items())
    return buffer.getvalue()


def read(folder: Path) -> dict[int, float]:
    """Block -> nats, as `to_csv` wrote them into a folder; empty where nothing was measured."""
    path = folder / FILE
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {int(line["block"]): float(line["loss_difference"]) for line in csv.DictReader(file)}
