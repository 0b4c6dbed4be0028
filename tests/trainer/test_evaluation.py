"""Validation loss by hand, and the command that scores a checkpoint."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.loading import build_datasets, validation_batches
from models.megatron_cpu import megatron_device
from nvfp4_train.config import ParallelConfig
from nvfp4_train.distributed import process_groups
from nvfp4_train.evaluate import main, recipe_for
from nvfp4_train.evaluation import validation_metrics
from nvfp4_train.exits import ExitCode
from nvfp4_train.metrics import read_metrics
from nvfp4_train.precision.recipes import CONFIG_DIR
from nvfp4_train.setup import build_quantized_model, open_datasets
from nvfp4_train.trainer import train
from tests.trainer.conftest import Make


def test_a_ragged_end_is_a_mean_over_tokens(make: Make, single_process: None) -> None:
    config = make("bf16")
    with process_groups(ParallelConfig(), 1) as world:
        corpus = open_datasets(config, lambda line: None).sources[0].corpus
        built = build_quantized_model(config, world, lambda line: None)
        datasets = build_datasets([corpus], config.data, seed=1, train_samples=4, validation_samples=10**6)
        source = datasets.sources[0]
        assert source.validation_samples * 64 > corpus.validation.tokens - 1  # the last sample is partly padding
        data = replace(config.data, micro_batch=source.validation_samples - 1)  # the last batch holds one sample
        found = validation_metrics(built.chunks, datasets, data, built.runtime, world)
        with torch.no_grad(), megatron_device(), built.runtime.evaluating():
            total = count = 0.0
            for batch in validation_batches(source, replace(config.data, micro_batch=1)):
                losses = built.chunks[0](batch["tokens"], labels=batch["labels"])
                total += float((losses * batch["loss_mask"]).double().sum())
                count += float(batch["loss_mask"].sum())
    assert count == corpus.validation.tokens - 1
    assert found["val/loss"] == pytest.approx(total / count, rel=1e-5)
    bits = total / count * corpus.validation.tokens / corpus.validation.bytes / math.log(2)
    assert found["val/bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_scoring_in_bf16_too(make: Make) -> None:
    config = make("nvfp4", "evaluation.bf16=true", "steps=2")
    assert train(config) == ExitCode.DONE
    last = read_metrics(Path(str(config.run_dir)) / "metrics.jsonl")[-1]
    assert last["val/loss_bf16"] == pytest.approx(last["val/loss"], rel=0.02)
    assert last["val/loss_bf16"] != last["val/loss"]
    assert "val/bits_per_byte_bf16" in last


def test_the_command_scores_what_the_run_scored(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = make("fp8_delayed", "evaluation.every=2")
    assert train(config) == ExitCode.DONE
    lines = read_metrics(Path(str(config.run_dir)) / "metrics.jsonl")
    capsys.readouterr()
    for options, line in (([], lines[3]), (["--step", "2"], lines[1])):
        assert main([str(config.run_dir), "--json", *options]) == ExitCode.DONE
        result = json.loads(capsys.readouterr().out)
        assert {name: result[name] for name in ("step", "val/loss", "val/bits_per_byte")} == {
            name: line[name] for name in ("step", "val/loss", "val/bits_per_byte")
        }
    assert main([str(config.run_dir), "--precision", "bf16"]) == ExitCode.DONE
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("val/"))
    assert float(printed["val/loss"]) == pytest.approx(lines[3]["val/loss"], rel=0.02)
    assert float(printed["val/loss"]) != pytest.approx(lines[3]["val/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--step", "3"], "there are: 2, 4"), (["--precision", "nvfp5"], "Did you mean"), (["--step", "2"], "damaged")],
)
def test_mistakes_are_named(options: list[str], message: str, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = make()
    assert train(config) == ExitCode.DONE
    (Path(str(config.run_dir)) / "checkpoints" / "step-00000002" / "__0_0.distcp").write_bytes(b"")
    capsys.readouterr()
    assert main([str(config.run_dir), *options]) == ExitCode.MISTAKE
    assert message in capsys.readouterr().err


def test_a_run_without_validation_has_nothing_to_score(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = make("bf16", "evaluation.sequences=0", "steps=1")
    assert train(config) == ExitCode.DONE
    assert main([str(config.run_dir)]) == ExitCode.MISTAKE
    assert "has evaluation.sequences=0" in capsys.readouterr().err


def test_another_recipe_is_that_of_the_run_s_experiment(make: Make, tmp_path: Path) -> None:
    """The 12B experiment keeps 2 + 8 blocks of a 4-bit recipe in BF16; a model of another name has the default."""
    (tmp_path / "precision").mkdir()
    mine = (CONFIG_DIR / "precision" / "mxfp4.yaml").read_text().replace("name: mxfp4", "name: mine")
    (tmp_path / "precision" / "mine.yaml").write_text(mine)
    config = make("bf16")
    for name, ends in (("nemotron_nano_12b_v2", (2, 8)), ("nemotron_h_8b", (0, 8)), ("my run", (0, 2))):
        found = recipe_for(replace(config, name=name), "mine", [str(tmp_path)])
        assert found.name == "mine"
        assert found.bf16_blocks.counts(10) == ends


@pytest.mark.parametrize("module", ["train", "evaluate"])
def test_help_needs_no_torch(module: str) -> None:
    program = (
        f"import sys\nfrom nvfp4_train.{module} import main\n"
        "try:\n    main(['--help'])\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout
