"""CUDA graphs as far as no GPU is needed: what a user reads when one can't be recorded, and when they make room."""

from __future__ import annotations

import pytest
import torch

from nvfp4_train import phase, trainer
from nvfp4_train.config import ConfigError
from nvfp4_train.exits import ExitCode
from nvfp4_train.graphs import MicroBatchGraphs
from tests.trainer.conftest import Make


def test_a_pass_that_can_not_be_recorded_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: MicroBatchGraphs) -> torch.cuda.CUDAGraph:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nDevice-side assertions ...")

    monkeypatch.setattr(MicroBatchGraphs, "_record", stopped)
    with pytest.raises(ConfigError, match=r"parallel\.cuda_graphs=never") as refused:
        object.__new__(MicroBatchGraphs)._recorded()
    assert "here: CUDA error: operation not permitted when stream is capturing. Write" in str(refused.value)


def test_memory_is_free_before_everything_that_runs_without_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Graphs:
        serve = False

        def __init__(self, *_: object) -> None: ...

        def make_room(self) -> None:
            asked.append(phase.current())

    monkeypatch.setattr(trainer, "choose_graphs", lambda *_: (True, ""))
    monkeypatch.setattr(trainer, "MicroBatchGraphs", Graphs)
    assert trainer.train(make("bf16", "steps=2")) == ExitCode.DONE
    assert asked == ["data of step 1", "data of step 2", "evaluation after step 2"]


def room(monkeypatch: pytest.MonkeyPatch, *, free: int, reserved: int, allocated: int, pool: int) -> bool:
    """Whether graphs that hold `pool` of the bytes that torch has `reserved` give them back."""
    graphs, dropped = object.__new__(MicroBatchGraphs), []
    graphs._pool_bytes = pool
    monkeypatch.setattr(graphs, "forget", lambda: dropped.append(1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated)
    graphs.make_room()
    return bool(dropped)


def test_they_are_dropped_where_a_step_without_them_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not room(monkeypatch, free=30, reserved=70, allocated=40, pool=30)
    assert room(monkeypatch, free=29, reserved=71, allocated=41, pool=30)
    assert not room(monkeypatch, free=10, reserved=90, allocated=40, pool=30)  # what torch keeps unused is room too
