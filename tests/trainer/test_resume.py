"""A run that stops and goes on is bit for bit the run that did not stop."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing

from nvfp4_train import trainer
from nvfp4_train.checkpoints.files import saved_steps
from nvfp4_train.config import RunConfig
from nvfp4_train.exits import ExitCode
from nvfp4_train.metrics import Metrics, read_metrics
from nvfp4_train.trainer import train
from tests.trainer.conftest import Make

TIMED = ("time/step_s", "time/data_s", "throughput/tokens_per_s", "memory/peak_gib")


def lines(config: RunConfig) -> list[Metrics]:
    """What a run logged, without what a clock or the machine says."""
    assert config.run_dir is not None
    found = read_metrics(Path(config.run_dir) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMED} for line in found]


def tensors(config: RunConfig, step: int) -> dict[str, torch.Tensor]:
    """What a run's checkpoint holds."""
    return checkpoint_tensors(Path(str(config.run_dir)) / "checkpoints" / f"step-{step:08d}")


def checkpoint_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Weights, moments, Adam's step and amax histories in a checkpoint."""
    found = dist_checkpointing.load_plain_tensors(str(path))
    histories, common = found.pop("precision"), found.pop("optimizer")
    plain = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    named = {f"history {name}": history for name, history in histories.items()}  # of weights, too
    return plain | named | {"step": common["state"]["common_step"]}


def assert_same_run(one: RunConfig, other: RunConfig, steps: int = 4) -> None:
    assert [line["step"] for line in lines(one)] == list(range(1, steps + 1))
    assert lines(one) == lines(other)
    first, second = tensors(one, steps), tensors(other, steps)
    assert first.keys() == second.keys()
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in first)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


@pytest.mark.parametrize("precision", ["bf16", "fp8_block", "fp8_delayed", "nvfp4"])
def test_stopped_between_checkpoints_and_resumed(
    precision: str, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = make(precision, run="whole"), make(precision, run="parts")
    assert train(whole) == ExitCode.DONE
    assert train(make(precision, "stop_after=3", run="parts")) == ExitCode.DONE
    assert [line["step"] for line in lines(parts)] == [1, 2, 3]
    assert saved_steps(Path(str(parts.run_dir)) / "checkpoints") == [2]
    capsys.readouterr()
    assert train(parts) == ExitCode.DONE
    assert "continues from step 2 of" in capsys.readouterr().out
    assert_same_run(whole, parts)


@pytest.mark.parametrize("precision", ["quartet2", "fp8_delayed"])
def test_resumed_before_at_and_after_a_switch_of_precision(precision: str, make: Make) -> None:
    """Step 3 is the first with a forward pass in BF16."""
    options = (precision, "precision.phases=[{start: 2, forward: bf16}]", "checkpoint.every=1", "checkpoint.keep=0")
    whole = make(*options, run="whole")
    assert train(whole) == ExitCode.DONE
    for stop in (1, 2, 3):
        parts = make(*options, run=f"parts-{stop}")
        assert train(replace(parts, stop_after=stop)) == train(parts) == ExitCode.DONE
        assert_same_run(whole, parts)


def test_losses_fall_and_differ_between_recipes(make: Make) -> None:
    assert train(make("bf16", run="bf16")) == train(make("nvfp4", run="nvfp4")) == ExitCode.DONE
    bf16, nvfp4 = lines(make(run="bf16")), lines(make(run="nvfp4"))
    assert bf16[-1]["train/loss"] < bf16[0]["train/loss"] - 0.5
    assert [line["data/hash"] for line in bf16] == [line["data/hash"] for line in nvfp4]
    assert bf16[0]["train/loss"] == pytest.approx(nvfp4[0]["train/loss"], rel=0.01)
    assert bf16[0]["train/loss"] != nvfp4[0]["train/loss"]


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 3), (signal.SIGINT, 2)])
def test_a_signal_saves_once_and_the_run_goes_on(
    number: signal.Signals,
    step: int,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In step 3, which would not be saved, and in step 2, which is saved anyway."""
    whole, parts = make(run="whole"), make(run="parts")
    assert train(whole) == ExitCode.DONE
    capsys.readouterr()
    with monkeypatch.context() as patch:
        real = trainer.run_micro_batches

        def signalled(*args, **kwargs):  # type: ignore[no-untyped-def]
            if args[2].step == step - 1 and kwargs["training"]:
                os.kill(os.getpid(), number)
            return real(*args, **kwargs)

        patch.setattr(trainer, "run_micro_batches", signalled)
        assert train(parts) == ExitCode.INTERRUPTED
    printed = capsys.readouterr().out
    for what in ("requested", "durable"):
        assert printed.count(f"checkpoint step-{step:08d}: {what}") == 1
    assert saved_steps(Path(str(parts.run_dir)) / "checkpoints") == sorted({2, step})
    assert [line["step"] for line in lines(parts)] == list(range(1, step + 1))
    assert train(parts) == ExitCode.DONE
    assert_same_run(whole, parts)


@pytest.mark.parametrize("again", ["bf16", "nvfp4"])
def test_a_run_that_is_complete_is_left_alone(again: str, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = make("bf16", "steps=2")
    assert train(config) == ExitCode.DONE
    before = files_of(config)
    capsys.readouterr()
    assert train(make(again, "steps=2")) == ExitCode.DONE
    assert "complete: 2 of 2 steps; nothing is written" in capsys.readouterr().out
    assert files_of(config) == before


def files_of(config: RunConfig) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in Path(str(config.run_dir)).rglob("*") if file.is_file()}


def test_a_recipe_that_changes_is_marked_until_it_is_saved(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def marked() -> list[tuple[int, str]]:
        found = lines(make())
        return [(line["step"], line["precision/recipe"]) for line in found if "precision/recipe" in line]

    assert train(make("nvfp4", "stop_after=2")) == ExitCode.DONE
    assert marked() == []
    assert train(make("bf16", "stop_after=3")) == ExitCode.DONE
    assert marked() == [(3, "bf16")]
    with monkeypatch.context() as patch:  # dies after the files are written, before a step

        def dies(self: object, batches: object) -> Metrics:
            raise MemoryError

        patch.setattr(trainer.Trainer, "_train_step", dies)
        with pytest.raises(MemoryError):
            train(make("bf16"))
    assert marked() == []
    assert train(make("bf16")) == ExitCode.DONE
    assert marked() == [(3, "bf16")]
    assert [line["step"] for line in lines(make())] == [1, 2, 3, 4]


def test_a_knob_that_changes_is_another_recipe(make: Make) -> None:
    assert train(make("nvfp4", "stop_after=2", "steps=3")) == ExitCode.DONE
    assert train(make("nvfp4", "precision.rotation=null", "steps=3")) == ExitCode.DONE
    assert ["precision/recipe" in line for line in lines(make())] == [False, False, True]


def test_fresh_runs_that_are_the_same_have_the_same_checkpoints(make: Make) -> None:
    """All of it but torch's index, which holds the path it was written under and an identity of the save."""
    sums = []
    for run in ("one", "two"):
        random.seed(run)
        np.random.seed(len(sums))
        config = make("bf16", "steps=1", "evaluation.sequences=0", run=run)
        assert train(config) == ExitCode.DONE
        file = Path(str(config.run_dir)) / "checkpoints" / "step-00000001" / "integrity.json"
        sums.append(json.loads(file.read_text())["files"])
    assert {name for name in sums[0] if sums[0][name] != sums[1][name]} <= {".metadata"}
    assert {"checkpoint.json", "__0_0.distcp"} <= sums[0].keys() == sums[1].keys()


def test_evaluation_leaves_no_trace_in_training(make: Make) -> None:
    often, never = make("fp8_delayed", "evaluation.every=1", run="often"), make("fp8_delayed", run="never")
    assert train(often) == ExitCode.DONE
    assert train(make("fp8_delayed", "evaluation.sequences=0", run="never")) == ExitCode.DONE
    without = [{name: value for name, value in line.items() if not name.startswith("val/")} for line in lines(often)]
    assert without == lines(never)
    for key, value in tensors(often, 4).items():
        assert torch.equal(value, tensors(never, 4)[key]), key


def test_a_branch_goes_on_from_another_run(make: Make) -> None:
    train(make("bf16", "stop_after=3", run="parent"))
    source = make(run="parent").run_dir
    branch = make("nvfp4", f"resume={source}", "optimizer.lr=1e-4", run="branch")
    assert train(branch) == ExitCode.DONE
    assert [line["step"] for line in lines(branch)] == [3, 4]
    assert lines(branch)[0]["tokens"] == 3 * 4 * 64
    assert [line["step"] for line in lines(make(run="parent"))] == [1, 2, 3]
    assert train(make("bf16", run="parent")) == ExitCode.DONE
    assert lines(make(run="parent"))[2]["data/hash"] == lines(branch)[0]["data/hash"]
