"""Every key of the schema, set on the command line: the value that was typed is used, printed and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from nvfp4_train import cli
from nvfp4_train.checks import value_at
from nvfp4_train.compose import compose
from nvfp4_train.config import RunConfig
from nvfp4_train.run_folder import prepare_run_folder, release_locks
from nvfp4_train.run_records import load_config
from nvfp4_train.schema import leaf_types, to_mapping

# Values that are legal together and differ from every default. Paths are absolute, so that they are used as typed.
PLAIN: dict[str, Any] = {
    "name": "other",
    "steps": 77,
    "seed": 5,
    "deterministic": False,
    "run_dir": None,  # filled in by the test
    "resume": "never",
    "stop_after": 9,
    "baseline": "/baseline",
    "model.pattern": "M-*-|M-",
    "model.hidden_size": 256,
    "model.ffn_hidden_size": 1024,
    "model.num_attention_heads": 16,
    "model.num_query_groups": 2,
    "model.head_dim": 64,
    "model.mamba_num_heads": 64,
    "model.mamba_head_dim": 16,
    "model.mamba_state_dim": 64,
    "model.mamba_num_groups": 4,
    "model.vocab_size": 300,
    "model.mamba_conv_width": 3,
    "model.mamba_chunk_size": 64,
    "model.vocab_multiple": 64,
    "model.tie_embeddings": True,
    "model.norm_eps": 1e-6,
    "model.init_std": 0.01,
    "model.init_residuals_per_block": 3,
    "model.recompute": "full",
    "model.kernels": "torch",
    "data.path": "/some/text",
    "data.prepared": "/some/prepared",
    "data.text_field": "content",
    "data.tokenizer": "/some/tokenizer.json",
    "data.max_bad_documents": 3,
    "data.validation_share": 0.1,
    "data.sequence_length": 512,
    "data.global_batch": 24,
    "data.micro_batch": 4,
    "data.workers": 2,
    "data.sources": [{"name": "a", "path": "/a", "weight": 2.5, "text_field": "body", "max_epochs": 4.0}],
    "data.phases": [{"start": 0.5, "weights": [1.0]}],
    "data.packing": "best_fit",
    "data.processes": 3,
    "data.stream": False,
    "tokenizer.train": "/some/new.json",
    "tokenizer.vocab_size": 1000,
    "tokenizer.special_tokens": ["END"],
    "tokenizer.megabytes": 20,
    "shard": "2/3",
    "optimizer.lr": 1.25e-4,
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.99,
    "optimizer.eps": 1e-7,
    "optimizer.weight_decay": 0.05,
    "optimizer.clip": 0.5,
    "optimizer.fuse_wgrad": False,
    "optimizer.max_skipped": 7,
    "schedule.warmup": "1M tokens",
    "schedule.decay": 12,
    "schedule.decay_style": "minus_sqrt",
    "schedule.min_lr_ratio": 0.05,
    "parallel.tensor": 2,
    "parallel.sequence": True,
    "parallel.pipeline": 3,
    "parallel.virtual_pipeline": 2,
    "parallel.context": 4,
    "parallel.expert": 2,
    "parallel.distributed_optimizer": True,
    "parallel.overlap_grad_reduce": True,
    "parallel.overlap_param_gather": True,
    "parallel.cuda_graphs": "never",
    "parallel.timeout": 33.0,
    "checkpoint.every": 13,
    "checkpoint.keep": 5,
    "checkpoint.keep_every": 26,
    "evaluation.every": 17,
    "evaluation.sequences": 21,
    "evaluation.bf16": True,
    "logging.wandb": "disabled",
    "logging.project": "elsewhere",
    "logging.group": "pair",
    "logging.name": "yes",
    "logging.health_every": 50,
    "debug.overfit": True,
    "debug.profile": 2,
    "precision.name": "renamed",
    "precision.description": "one line",
    "precision.source": "nowhere",
    "precision.bf16_blocks.first": 1,
    "precision.bf16_blocks.last": 0.25,
    "precision.recipe_rules": [{"format": "bf16", "match": None, "letter": None, "role": "qkv"}],
    "precision.rules": [{"format": "mxfp8", "match": "*.out_proj", "letter": "M", "role": None}],
    "precision.phases": [{"start": 0.82, "forward": "bf16", "backward": None}],
    "precision.backend": "emulated",
    "precision.gemm": "bf16_scaled",
}
KNOBS: dict[str, Any] = {
    "precision.rotation": 32,
    "precision.gradient_rounding": "nearest",
    "precision.weight_tile": [1, 16],
    "precision.four_over_six": "mse",
    "precision.knobs.rotation": [32, None],
    "precision.knobs.gradient_rounding": ["nearest"],
    "precision.knobs.weight_tile": [[1, 16], [16, 16]],
    "precision.knobs.four_over_six": ["mse", None],
}
OPERANDS = ("fprop.input", "fprop.weight", "dgrad.gradient", "dgrad.weight", "wgrad.gradient", "wgrad.input")


def _operands(**values: Any) -> dict[str, Any]:
    return {f"precision.{operand}.{field}": value for operand in OPERANDS for field, value in values.items()}


SCENARIOS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "plain": ([], PLAIN),
    "knobs": ([], KNOBS),
    "delayed": (["precision=fp8_delayed"], {"precision.amax_history": 16}),
    "operands mxfp8": (
        ["precision=bf16"],
        _operands(format="mxfp8", tile=[1, 32], scale_rounding="ocp", element="e4m3"),
    ),
    "operands nvfp4": (["precision=bf16"], _operands(format="nvfp4", scaling="row", rounding="stochastic")),
    "operands four over six": (["precision=bf16"], _operands(format="nvfp4", four_over_six="mae")),
    "operands rotated": (["precision=bf16"], _operands(format="nvfp4", rotation=64, signs="fresh")),
    "operands fp8": (["precision=bf16"], _operands(format="fp8_block", power_of_two=True)),
    "operands corrected": (
        ["precision=quartet2"],
        _operands(source="original", correction=None) | {"precision.wgrad.input.source": "decoded"},
    ),
}


def _written(value: Any) -> str:
    """A value as it is typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(item)}" for key, item in value.items()) + "}"
    return f'"{value}"' if value == "yes" else str(value)


def test_the_scenarios_touch_every_key() -> None:
    touched = {key for _, values in SCENARIOS.values() for key in values}
    assert touched == set(leaf_types(RunConfig))


def _at(mapping: Any, key: str) -> Any:
    for name in key.split("."):
        mapping = mapping[name]
    return mapping


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_used_printed_and_saved_are_what_was_typed(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base, values = SCENARIOS[scenario]
    if "run_dir" in values:
        values = {**values, "run_dir": str(tmp_path / "here")}
    overrides = [*base, *(f"{key}={_written(value)}" for key, value in values.items())]

    config = compose(overrides)
    used = {key: _at(to_mapping(config), key) for key in values}
    assert used == values
    assert cli.run(lambda config: None, "prepare", [*overrides, "--cfg", "job"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert {key: _at(printed, key) for key in values} == values
    try:
        folder = prepare_run_folder(config)
        folder.record({}, {})
    finally:
        release_locks()
    assert load_config(folder.path) == folder.config
    saved = yaml.safe_load((folder.path / "config.yaml").read_text())
    assert {key: _at(saved, key) for key in values} == values
    assert value_at(folder.config, "run_dir") == str(folder.path)


def test_a_knob_reaches_the_operands_that_use_it() -> None:
    config = compose(["precision.rotation=64", "precision.gradient_rounding=nearest", "precision.weight_tile=[1,16]"])
    precision = config.precision
    assert (precision.wgrad.gradient.rotation, precision.wgrad.input.rotation) == (64, 64)
    assert (precision.dgrad.gradient.rounding, precision.wgrad.gradient.rounding) == ("nearest", "nearest")
    assert (precision.fprop.weight.tile, precision.dgrad.weight.tile) == ((1, 16), (1, 16))
