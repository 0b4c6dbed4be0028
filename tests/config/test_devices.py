"""A GPU that can't be used, or that is too small: said before the model is built, with what mends it. Order of sums."""

from __future__ import annotations

import os
import shutil
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from models.shapes import linear_shapes
from nvfp4_train.compose import compose
from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.devices import check_cuda, fix_order_of_sums, memory_problem
from nvfp4_train.memory import Machine, memory
from nvfp4_train.precision.assignment import assign

GIB = 2**30


def problem(config: RunConfig, gib: float, backend: str = "emulated") -> str | None:
    linears = assign(config.precision, linear_shapes(config.model))
    return memory_problem(config, linears, backend, int(gib * GIB), "NVIDIA Card")


def needed(config: RunConfig, native: bool = False) -> float:
    linears = assign(config.precision, linear_shapes(config.model))
    tokens = config.data.micro_batch * config.data.sequence_length
    return memory(config.model, linears, tokens, Machine(native=native)).total / GIB


def test_a_card_that_is_too_small_names_the_overrides_that_fit() -> None:
    config = compose(["experiment=1b"])
    total = needed(config)
    assert problem(config, total + 0.01) is None
    message = problem(config, total - 1)
    assert message is not None
    for word in (f"1b needs about {total:.0f} GiB", "data.micro_batch=4", "model.recompute=none", "NVIDIA Card has"):
        assert word in message
    for override in ("model.recompute=selective", "model.recompute=full", "data.micro_batch=2"):
        fitting = needed(compose(["experiment=1b", override]))
        assert f"{override} ({fitting:.0f} GiB)" in message


def test_only_what_fits_is_offered() -> None:
    config = compose(["experiment=1b"])
    smallest = needed(compose(["experiment=1b", "data.micro_batch=1", "model.recompute=full"]))
    message = problem(config, smallest + 0.1)
    assert message is not None
    assert f"data.micro_batch=1 model.recompute=full ({smallest:.0f} GiB)" in message
    assert "model.recompute=selective (" not in message
    message = problem(config, smallest - 0.1)
    assert message is not None
    assert "Not even one sequence with full recompute fits" in message
    assert "parallel.tensor" in message


def test_fp8_tensor_cores_need_less() -> None:
    config = compose(["experiment=1b", "precision=fp8_block"])
    native, emulated = needed(config, native=True), needed(config)
    assert native < emulated
    between = (native + emulated) / 2
    assert problem(config, between, "native") is None
    assert problem(config, between) is not None


def break_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nMore lines.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_an_old_driver_is_no_silent_training_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    break_the_driver(monkeypatch)
    with pytest.raises(ConfigError) as error:
        check_cuda()
    message = str(error.value)
    for word in ("built for CUDA 13.0", "system is too old (found version 12020)", "CUDA_VISIBLE_DEVICES="):
        assert word in message
    assert "More lines" not in message


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_devices_mean_the_cpu(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    break_the_driver(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    check_cuda()


def test_a_machine_without_a_driver_is_a_cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    break_the_driver(monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    check_cuda()


def test_sums_in_one_order_for_torch_cublas_and_mamba(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    determinism: Any = ModuleType("mamba_ssm.utils.determinism")
    determinism.set_deterministic_mode = told.append
    monkeypatch.setitem(sys.modules, determinism.__name__, determinism)
    monkeypatch.setenv("MAMBA_DETERMINISTIC", "0")  # numbers follow the configuration alone
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    try:
        assert fix_order_of_sums(True, torch.device("cpu")) == ""
        assert told == []
        assert not torch.are_deterministic_algorithms_enabled()
        assert "any order" in fix_order_of_sums(False, torch.device("cuda"))
        assert "one fixed order" in fix_order_of_sums(True, torch.device("cuda"))
        assert torch.are_deterministic_algorithms_enabled()
        assert told == [False, True]
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert "any order" in fix_order_of_sums(False, torch.device("cuda"))
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
