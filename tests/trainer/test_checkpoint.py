"""Checkpoints: whole or not there, found damaged before use, complete, and nothing in them is run."""

from __future__ import annotations

import errno
import os
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from models.hybrid import build_model
from models.initialization import A_MAX, A_MIN, DT_FLOOR, DT_MAX, DT_MIN
from nvfp4_train import trainer
from nvfp4_train.checkpoints import files as checkpoint_files
from nvfp4_train.checkpoints import state as checkpoint
from nvfp4_train.checkpoints import writer as checkpoint_writer
from nvfp4_train.checkpoints.files import CheckpointError, Header, damage, newest_whole, saved_steps, step_folder
from nvfp4_train.checkpoints.state import TrainingState
from nvfp4_train.checkpoints.writer import CheckpointWriter
from nvfp4_train.config import CheckpointConfig, OptimizerConfig, ParallelConfig, RunConfig
from nvfp4_train.distributed import World, no_new_teams, process_groups
from nvfp4_train.exits import ExitCode
from nvfp4_train.metrics import read_metrics
from nvfp4_train.optimizer import build_optimizer, inner_optimizers, wrap_data_parallel
from nvfp4_train.precision.runtime import PrecisionRuntime
from nvfp4_train.trainer import train
from tests.models.plain_linears import PLAIN
from tests.trainer.conftest import Make

HEADER = Header(1, 4, 256, 0, "bf16", {"device": "cpu"}, 1)


@pytest.fixture
def world(single_process: None) -> Iterator[World]:
    with process_groups(ParallelConfig(), 1) as found:
        yield found


def state_of(config: RunConfig, seed: int = 1) -> TrainingState:
    """A model without precision and its optimizer, with moments that look used."""
    model = build_model(config.model, PLAIN, sequence_length=64, seed=seed)
    optimizer = build_optimizer(OptimizerConfig(lr=0.1), config.parallel, wrap_data_parallel([model], config.parallel))
    for inner in inner_optimizers(optimizer):
        for number, moments in enumerate(inner.state.values()):
            moments["exp_avg"].normal_(generator=torch.Generator().manual_seed(seed + number))
            moments["exp_avg_sq"].uniform_(generator=torch.Generator().manual_seed(seed + number))
            moments["step"].fill_(7.0)
    return TrainingState([model], optimizer, PrecisionRuntime(1))


def save(root: Path, state: TrainingState, header: Header, world: World, *, keep: int = 0, every: int = 0) -> Path:
    """Request a checkpoint and wait until it is durable."""
    writer = CheckpointWriter(root, CheckpointConfig(1, keep, every), world, print)
    writer.request(state, header)
    writer.finish()
    return step_folder(root, header.step)


def moments_of(state: TrainingState) -> list[torch.Tensor]:
    return [
        moments[name]
        for inner in inner_optimizers(state.optimizer)
        for parameter in state.chunks[0].parameters()
        for moments in [inner.state[parameter]]
        for name in ("exp_avg", "exp_avg_sq", "step")
    ]


def truncate(path: Path) -> None:
    shard = next(path.glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size - 1)


def test_loaded_equals_saved_bitwise_in_fp32_and_nothing_is_initialised_after(
    make: Make, world: World, tmp_path: Path
) -> None:
    saved, loaded = state_of(make(), 1), state_of(make(), 2)
    assert not all(map(torch.equal, saved.chunks[0].parameters(), loaded.chunks[0].parameters()))
    path = save(tmp_path, saved, HEADER, world)
    assert checkpoint.load(path, loaded, world).header == HEADER
    before = dict(saved.chunks[0].named_parameters())
    for name, parameter in loaded.chunks[0].named_parameters():
        assert parameter.dtype == torch.float32, name
        assert torch.equal(parameter, before[name]), name
    for one, other in zip(moments_of(saved), moments_of(loaded), strict=True):
        assert torch.equal(one, other)
    counts = {id(moments["step"]) for inner in inner_optimizers(loaded.optimizer) for moments in inner.state.values()}
    assert len(counts) == len(list(loaded.chunks[0].parameters()))  # one shared counter would advance many times a step


def test_a_fresh_model_has_its_mamba_parameters_in_range(make: Make, world: World) -> None:
    named = dict(state_of(make()).chunks[0].named_parameters())
    dt = functional.softplus(named["decoder.layers.0.mixer.dt_bias"])
    decay = named["decoder.layers.0.mixer.A_log"].exp()
    assert min(DT_MIN, DT_FLOOR) * (1 - 1e-5) <= dt.min() <= dt.max() <= DT_MAX * (1 + 1e-5)
    assert A_MIN * (1 - 1e-6) <= decay.min() <= decay.max() <= A_MAX * (1 + 1e-6)
    assert torch.equal(named["decoder.layers.0.mixer.D"], torch.ones(16))


def test_random_states_are_those_before_the_save(make: Make, world: World, tmp_path: Path) -> None:
    state = state_of(make())
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    path = save(tmp_path, state, HEADER, world)
    drawn = (random.random(), np.random.rand(), torch.rand(3).tolist())
    checkpoint.load(path, state, world)
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == drawn


def test_a_missing_moment_is_an_error(
    make: Make, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(make())
    real = checkpoint.sharded_moments

    def without_one(*args: Any) -> Any:
        found = real(*args)
        del found["exp_avg_sq"]["decoder.layers.1.mlp.linear_fc1.weight"]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "sharded_moments", without_one)
        path = save(tmp_path, state, HEADER, world)
    with pytest.raises(CheckpointError, match=r"does not fit.*optimizer\.state\.exp_avg_sq\."):
        checkpoint.load(path, state, world)


def test_rates_and_decays_are_those_of_now(make: Make, world: World, tmp_path: Path) -> None:
    path = save(tmp_path, state_of(make()), HEADER, world)
    state = state_of(make())
    now = OptimizerConfig(lr=0.5, beta1=0.8, weight_decay=0.3)
    optimizer = build_optimizer(now, ParallelConfig(), wrap_data_parallel(state.chunks, ParallelConfig()))
    checkpoint.load(path, replace(state, optimizer=optimizer), world)
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.3]
    assert {(group["lr"], group["betas"]) for group in optimizer.param_groups} == {(0.5, (0.8, 0.95))}


def test_another_model_is_an_error(make: Make, world: World, tmp_path: Path) -> None:
    path = save(tmp_path, state_of(make()), HEADER, world)
    with pytest.raises(CheckpointError, match="does not fit"):
        checkpoint.load(path, state_of(make("bf16", "model.ffn_hidden_size=384")), world)


def test_latest_moves_last_and_old_ones_go(
    make: Make, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(make())
    for step in (1, 2, 3):
        save(tmp_path, state, replace(HEADER, step=step), world, keep=2)
    assert saved_steps(tmp_path) == [2, 3]
    assert (tmp_path / "latest").read_text() == "step-00000003\n"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # between the folder's rename and `latest`
        patch.setattr(checkpoint_files.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, state, replace(HEADER, step=4), world, keep=2)
    assert saved_steps(tmp_path) == [2, 3, 4]
    assert newest_whole(tmp_path) == (tmp_path / "step-00000003", [])
    save(tmp_path, state, replace(HEADER, step=4), world, keep=2)
    assert newest_whole(tmp_path)[0] == tmp_path / "step-00000004"


def test_what_a_crash_left_unfinished_is_no_checkpoint_and_goes(make: Make, world: World, tmp_path: Path) -> None:
    (tmp_path / "step-00000007.tmp").mkdir()
    (tmp_path / "step-00000007.tmp" / "__0_0.distcp").write_bytes(b"half")
    assert newest_whole(tmp_path) == (None, [])
    save(tmp_path, state_of(make()), HEADER, world, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step-00000001"]


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("__0_0.distcp", "truncate"),
        ("__0_0.distcp", "flip"),
        (".metadata", "truncate"),
        ("checkpoint.json", "flip"),
        ("__0_0.distcp", "remove"),
        ("integrity.json", "remove"),
    ],
)
def test_damage_is_found_and_names_the_file(name: str, harm: str, make: Make, world: World, tmp_path: Path) -> None:
    path = save(tmp_path, state_of(make()), HEADER, world)
    assert damage(path) is None
    file = path / name
    content = bytearray(file.read_bytes())
    if harm == "remove":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content if harm == "flip" else content[:-1])
    assert name in str(damage(path))


@pytest.mark.parametrize("name", ["common.pt", "metadata.json", "__9_9.distcp"])
def test_a_file_that_was_not_saved_is_damage(name: str, make: Make, world: World, tmp_path: Path) -> None:
    path = save(tmp_path, state_of(make()), HEADER, world)
    listed = (path / name).exists()
    (path / name).write_bytes(b"{}")
    assert str(damage(path)).startswith(f"{name} is damaged" if listed else f"unlisted file {name}")


class Evil:
    """What someone might put where a checkpoint's index is expected."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_an_index_that_would_run_code_is_refused(make: Make, world: World, tmp_path: Path) -> None:
    path = save(tmp_path / "c", state_of(make()), HEADER, world)
    (path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    save_sums(path)
    assert "posix.mkdir" in str(damage(path))
    assert not (tmp_path / "ran").exists()


def test_plain_state_that_would_run_code_is_refused(make: Make, world: World, tmp_path: Path) -> None:
    state = state_of(make())
    evil = replace(state, runtime=SimpleNamespace(state_dict=lambda: {"x": Evil(tmp_path / "ran")}))
    path = save(tmp_path / "c", evil, HEADER, world)
    with pytest.raises(CheckpointError, match=r"is not loaded: it refers to posix\.mkdir") as error:
        checkpoint.load(path, state, world)
    assert "weights_only" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def save_sums(path: Path) -> None:
    """Sums that fit what is there now."""
    (path / "integrity.json").unlink()
    from megatron.core.dist_checkpointing.validation import save_integrity_manifest

    save_integrity_manifest(str(path))


def test_a_full_disk_names_bytes_and_leaves_the_checkpoint_before(
    make: Make, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(make())
    save(tmp_path, state, HEADER, world, keep=2)
    needed = sum(3 * 4 * parameter.numel() for parameter in state.chunks[0].parameters()) + 2**20
    free = SimpleNamespace(total=10**9, used=10**9, free=12345)
    monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", lambda path: free)
    with pytest.raises(CheckpointError, match=rf"in {tmp_path}: {needed:,} bytes are needed and 12,345 are free"):
        save(tmp_path, state, replace(HEADER, step=2), world, keep=2)
    assert newest_whole(tmp_path) == (tmp_path / "step-00000001", [])
    assert not list(tmp_path.glob("*.tmp"))


def test_a_disk_that_fills_up_while_writing(
    make: Make, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(make())
    save(tmp_path, state, HEADER, world, keep=2)

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("writer failed") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_writer.FileSystemWriterAsync, "write_preloaded_data", full)
    with pytest.raises(CheckpointError, match="no room for a checkpoint in"):
        save(tmp_path, state, replace(HEADER, step=2), world, keep=2)
    assert newest_whole(tmp_path) == (tmp_path / "step-00000001", [])
    assert not list(tmp_path.glob("*.tmp"))


def test_a_truncated_shard_falls_back_and_the_run_ends_the_same(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = make("bf16", "checkpoint.every=1")
    folder = Path(str(config.run_dir))
    assert train(make("bf16", "checkpoint.every=1", "stop_after=3")) == ExitCode.DONE
    losses = [line["train/loss"] for line in read_metrics(folder / "metrics.jsonl")]
    truncate(folder / "checkpoints" / "step-00000003")
    with pytest.raises(CheckpointError, match=r"step-00000003.*__0_0\.distcp is damaged"):
        train(make("bf16", f"resume={folder}/checkpoints/step-00000003", run="branch"))
    capsys.readouterr()
    assert train(config) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert "step-00000003: __0_0.distcp is damaged" in printed
    assert "continues from step 2 of" in printed
    assert [line["train/loss"] for line in read_metrics(folder / "metrics.jsonl")][:3] == losses
    assert saved_steps(folder / "checkpoints") == [2, 3, 4]  # what a process started from, it does not drop
    assert damage(folder / "checkpoints" / "step-00000003") is None


@pytest.mark.parametrize(("before", "after"), [("nvfp4", "bf16"), ("fp8_delayed", "bf16"), ("bf16", "fp8_delayed")])
def test_the_recipe_may_change_on_resume_with_one_line(
    before: str, after: str, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(make(before, "stop_after=2")) == ExitCode.DONE
    capsys.readouterr()
    assert train(make(after)) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert printed.count(f"precision was '{before}', is '{after}' from here on") == 1
    assert ("start with an empty amax history" in printed) == (after == "fp8_delayed")


def test_another_machine_is_said_in_one_line(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(make("bf16", "stop_after=2")) == ExitCode.DONE
    capsys.readouterr()
    monkeypatch.setattr(trainer, "device_name", lambda device: "NVIDIA B200")
    assert train(make()) == ExitCode.DONE
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "device cpu there, NVIDIA B200 here" in warnings[0]


def test_collectives_of_a_checkpoint_start_no_teams() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with no_new_teams():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
