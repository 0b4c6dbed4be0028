"""What a run logs, says and refuses along its way."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.config import DataError
from data.loading import batch_hash, train_batches
from models.hybrid import named_linears
from nvfp4_train import trainer
from nvfp4_train.checkpoints.files import saved_steps
from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.distributed import World, check_same
from nvfp4_train.exits import ExitCode, guarded
from nvfp4_train.metrics import Metrics, read_metrics
from nvfp4_train.optimizer import inner_optimizers
from nvfp4_train.precision.config import PrecisionError
from nvfp4_train.precision.three_gemms import ThreeGemms
from nvfp4_train.setup import open_datasets
from nvfp4_train.trainer import train
from tests.trainer.conftest import Make


def lines(config: RunConfig) -> list[Metrics]:
    return read_metrics(Path(str(config.run_dir)) / "metrics.jsonl")


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int], name: str, value: float = float("nan")) -> None:
    """Put `value` into one element of the gradient of `name` at these steps, counted from 1."""
    real = trainer.run_micro_batches

    def poisoned(chunks: Any, batches: Any, runtime: Any, world: Any, *, training: bool, graphs: Any = None) -> Any:
        step = runtime.step
        loss = real(chunks, batches, runtime, world, training=training, graphs=graphs)
        if training and step + 1 in steps:
            dict(chunks[0].module.named_parameters())[name].main_grad.view(-1)[3] = value
        return loss

    monkeypatch.setattr(trainer, "run_micro_batches", poisoned)


def unchanged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool, bool]]:
    """A list to which each step to come adds whether it left all weights, all moments and counts, and all histories of
    delayed scaling as they were.
    """
    found, real = [], trainer.Trainer._train_step

    def held(run: trainer.Trainer) -> tuple[list[torch.Tensor], ...]:
        states = (state for inner in inner_optimizers(run.optimizer) for state in inner.state.values())
        moments = [value for state in states for value in state.values()]
        return [*run.chunks[0].parameters()], moments, [*run.runtime.state_dict().values()]

    def watched(self: trainer.Trainer, batches: Any) -> Metrics:
        before = [[tensor.detach().clone() for tensor in kind] for kind in held(self)]
        metrics = real(self, batches)
        weights, moments, histories = (all(map(torch.equal, *kinds)) for kinds in zip(before, held(self), strict=True))
        found.append((weights, moments, histories))
        return metrics

    monkeypatch.setattr(trainer.Trainer, "_train_step", watched)
    return found


def test_names_and_values_of_a_line(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = make("nvfp4", "steps=2", "evaluation.every=0")
    assert train(config) == ExitCode.DONE
    first, last = lines(config)
    everywhere = {
        "step", "tokens", "train/loss", "optim/lr", "optim/grad_norm", "throughput/tokens_per_s", "memory/peak_gib",
        "time/step_s", "time/data_s", "data/hash",
    }  # fmt: skip
    assert set(first) == everywhere
    assert set(last) == everywhere | {"val/loss", "val/bits_per_byte"}
    assert (first["step"], first["tokens"], last["tokens"]) == (1, 4 * 64, 2 * 4 * 64)
    lr = config.optimizer.lr
    assert (first["optim/lr"], last["optim/lr"]) == (lr, pytest.approx(0.01 * lr))
    assert first["train/loss"] == pytest.approx(5.55, abs=0.15)  # ln 257, and a little
    assert first["throughput/tokens_per_s"] == pytest.approx(256 / first["time/step_s"])
    assert 0 < first["time/data_s"] < first["time/step_s"]
    assert 0.1 < first["memory/peak_gib"] < 8
    # bytes are tokens here, one end-of-document a text: bits a byte are by the whole split's ratio
    assert last["val/bits_per_byte"] == pytest.approx(last["val/loss"] / 0.6931, rel=0.01)
    printed = capsys.readouterr().out
    assert re.search(
        r"^step 1/2  50\.0%  loss 5\.\d{4}  lr \S+  grad \S+  [\d,]+ tok/s  "
        r"(waited [\d.]+ m?s for data  )?ETA 0:\d\d:\d\d$",
        printed,
        re.M,
    )
    for said in (
        "run folder",
        "parameters",
        "Mamba scan",
        "precision nvfp4",
        "epochs",
        "weight decay 0.1 on",
        "bits_per_byte",
    ):
        assert said in printed
    folder = Path(str(config.run_dir))
    assert json.loads((folder / "precision.json").read_text())["recipe"] == "nvfp4"
    assert json.loads((folder / "environment.json").read_text())["world_size"] == 1


def test_the_hash_is_of_the_steps_global_batch_in_any_micro_batch(make: Make) -> None:
    small, large = make("bf16", "steps=2", run="small"), make("bf16", "steps=2", "data.micro_batch=4", run="large")
    assert train(small) == train(large) == ExitCode.DONE
    batches = train_batches(open_datasets(large, lambda line: None), large.data, consumed_samples=0)
    expected = [batch_hash(next(batches)["tokens"]) for _ in range(2)]
    assert expected[0] != expected[1]
    assert [line["data/hash"] for line in lines(small)] == [line["data/hash"] for line in lines(large)] == expected


@pytest.mark.parametrize("precision", ["bf16", "fp8_delayed"])
def test_a_bad_gradient_skips_the_step_and_nothing_else(
    precision: str, make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, {2}, "decoder.layers.1.mlp.linear_fc1.weight")
    seen = unchanged(monkeypatch)
    config = make(precision, "checkpoint.every=1", "checkpoint.keep=0")
    assert train(config) == ExitCode.DONE
    has_histories = precision == "fp8_delayed"
    trained = (False, False, not has_histories)
    assert seen == [trained, (True, True, True), trained, trained]
    second = lines(config)[1]
    assert second["optim/grad_norm"] is None
    assert second["train/loss"] > 0
    assert lines(config)[2]["tokens"] == 3 * 256
    printed = capsys.readouterr().out
    assert "step 2 skipped (1 of 5 in a row)" in printed
    assert "first bad on rank 0: gradient of decoder.layers.1.mlp.linear_fc1.weight" in printed


def test_too_many_bad_steps_in_a_row_end_the_run_unsaved(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, {3, 4}, "decoder.layers.2.input_layernorm.weight", float("inf"))
    config = make("bf16", "optimizer.max_skipped=2")
    assert train(config) == ExitCode.NON_FINITE == 4
    assert saved_steps(Path(str(config.run_dir)) / "checkpoints") == [2]
    printed = capsys.readouterr().out
    assert "step 4 skipped (2 of 2 in a row)" in printed
    assert "stopped at step 4" in printed
    assert "gradient of decoder.layers.2.input_layernorm.weight" in printed


def test_weights_that_are_not_finite_are_never_saved(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = trainer.Trainer._update

    def spoil(self: Any, norm: float, lr: float) -> None:
        real(self, norm, lr)
        if self.step == 3:
            with torch.no_grad():
                self.chunks[0].decoder.layers[1].mlp.linear_fc2.weight[0, 0] = float("nan")

    monkeypatch.setattr(trainer.Trainer, "_update", spoil)
    config = make()
    assert train(config) == ExitCode.NON_FINITE
    assert saved_steps(Path(str(config.run_dir)) / "checkpoints") == [2]
    assert "weight decoder.layers.1.mlp.linear_fc2.weight is not finite on rank 0" in capsys.readouterr().out


def test_a_bad_forward_pass_names_the_first_bad_output(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = trainer.Trainer.__init__

    def break_a_norm(self: Any, *args: Any) -> None:
        real(self, *args)
        norm = self.chunks[0].decoder.layers[2].input_layernorm
        norm.register_forward_hook(lambda module, inputs, output: (output[0] * float("nan"), output[1]))

    monkeypatch.setattr(trainer.Trainer, "__init__", break_a_norm)
    config = make("bf16", "optimizer.max_skipped=1")
    assert train(config) == ExitCode.NON_FINITE
    assert "output of decoder.layers.2.input_layernorm" in capsys.readouterr().out
    assert lines(config)[0]["train/loss"] is None


def test_the_map_that_ran_must_be_the_map_that_was_meant(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trainer.build_quantized_model

    def other_map(*args: Any) -> Any:
        built = real(*args)
        meant = next(one for one in built.assignments if one.name == "decoder.layers.1.mlp.linear_fc1")
        named_linears(built.chunks[0])[meant.name].gemms = ThreeGemms(replace(meant, fprop=None), built.runtime)
        return built

    monkeypatch.setattr(trainer, "build_quantized_model", other_map)
    with pytest.raises(PrecisionError, match=r"decoder\.layers\.1\.mlp\.linear_fc1 fprop: meant nvfp4, ran bf16"):
        train(make("nvfp4"))


def test_a_phase_is_announced_and_marked(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = make("nvfp4", "precision.phases=[{start: 0.5, forward: bf16}]")
    assert train(config) == ExitCode.DONE
    assert "precision from step 3" in capsys.readouterr().out
    marked = [(line["step"], line["precision/forward"]) for line in lines(config) if "precision/forward" in line]
    assert marked == [(3, "bf16")]


def test_passes_that_begin_with_the_run_or_change_on_resume_are_marked(make: Make) -> None:
    def marks() -> list[tuple[int, str, str]]:
        found = [line for line in lines(early) if "precision/forward" in line]
        return [(line["step"], line["precision/forward"], line["precision/backward"]) for line in found]

    early = make(
        "nvfp4", "precision.phases=[{start: 0, forward: bf16}]", "steps=3", "checkpoint.every=1", "stop_after=1"
    )
    assert train(early) == ExitCode.DONE
    assert marks() == [(1, "bf16", "recipe")]
    assert train(replace(early, stop_after=2)) == ExitCode.DONE
    assert marks() == [(1, "bf16", "recipe")]
    without = replace(early, stop_after=None, precision=replace(early.precision, phases=()))
    assert train(without) == ExitCode.DONE
    assert marks() == [(1, "bf16", "recipe"), (3, "recipe", "recipe")]


def test_a_knob_that_is_off_works_and_is_said(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(make("nvfp4", "steps=1", "precision.rotation=null")) == ExitCode.DONE
    assert len(re.findall(r"left out: rotation", capsys.readouterr().out)) == 1


def test_health_is_sampled_when_asked(make: Make) -> None:
    config = make("nvfp4", "logging.health_every=2", "evaluation.every=0")
    assert train(config) == ExitCode.DONE
    with_health = [line["step"] for line in lines(config) if any(name.startswith("quant/") for name in line)]
    assert with_health == [2, 4]
    assert 10 < lines(config)[1]["quant/forward_sqnr_db"] < 30


def test_overfit_repeats_the_first_batch(make: Make) -> None:
    config = make("bf16", "debug.overfit=true", "steps=3")
    assert train(config) == ExitCode.DONE
    assert len({line["data/hash"] for line in lines(config)}) == 1
    once = make("bf16", "steps=1", run="once")
    train(once)
    assert lines(once)[0]["data/hash"] == lines(config)[0]["data/hash"]


def test_profile_writes_a_trace(make: Make) -> None:
    config = make("bf16", "debug.profile=1", "evaluation.sequences=0")
    assert train(config) == ExitCode.DONE
    assert json.loads((Path(str(config.run_dir)) / "profile.json").read_text())["traceEvents"]


def test_ranks_with_other_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvfp4_train import distributed

    world = World(0, 2, torch.device("cpu"), 0, 2)
    mine = {"config": {"optimizer": {"lr": 1.0}, "steps": 3}, "versions": {"torch": "2.11"}}
    theirs = {"config": {"optimizer": {"lr": 2.0}, "steps": 3}, "versions": {"torch": "2.12"}}
    per_key: list[Any] = []

    def on_two_ranks(item: Any, world: World) -> list[Any]:
        """Hashes of the whole differ; the longer messages are those of both ranks, once both were seen."""
        if isinstance(item, str):
            return [item, "another"]
        per_key.append(item)
        return [per_key[0], per_key[-1]]

    monkeypatch.setattr(distributed, "gather", on_two_ranks)
    check_same(mine, world)
    with pytest.raises(ConfigError, match=r"rank 1 .* config\.optimizer\.lr, versions\.torch than rank 0"):
        check_same(theirs, world)
    per_key.clear()
    monkeypatch.setattr(distributed, "gather", lambda item, world: [item, item])
    check_same(theirs, world)
    assert not per_key


def test_refused_data_leave_no_folder_and_no_configuration_on_the_screen(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError):
        train(make("bf16", f"data.path={tmp_path / 'empty'}"))
    assert not (tmp_path / "run").exists()
    assert "hidden_size" not in capsys.readouterr().out


def test_a_disk_that_fills_up_under_the_metrics_is_said_and_the_run_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make()
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        return real(descriptor, data[:20] if data.startswith(b'{"step": 4') else data)

    with monkeypatch.context() as patch:
        patch.setattr("nvfp4_train.metrics.os.write", full)
        assert guarded(lambda: train(config)) == ExitCode.MISTAKE
    said = capsys.readouterr().err
    assert said == (
        f"error: {config.run_dir}/metrics.jsonl: No space left on device. Free some space; "
        "the same command goes on from the last checkpoint.\n"
    )
    assert train(config) == ExitCode.DONE
    assert "warning" not in capsys.readouterr().out
    assert [line["step"] for line in lines(config)] == [1, 2, 3, 4]


def test_lost_lines_of_metrics_are_said_on_resume(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = make("bf16", "stop_after=2", "steps=3")
    assert train(config) == ExitCode.DONE
    (Path(str(config.run_dir)) / "metrics.jsonl").write_text("")
    assert train(make("bf16", "steps=3")) == ExitCode.DONE
    assert f"warning: {config.run_dir}/metrics.jsonl: no line for step 1 to 2." in capsys.readouterr().out
    assert [line["step"] for line in lines(config)] == [3]
