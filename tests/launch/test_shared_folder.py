"""A run folder that a node does not share is found at the start. Ranks are threads here, each a node of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_train import shared_folder
from nvfp4_train.config import ConfigError
from nvfp4_train.distributed import World
from nvfp4_train.shared_folder import check_shared


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[BaseException | None]]:
    """`check(file of rank 0, file of rank 1)`: what each rank raises."""
    slots: list[Any] = [None, None]
    barrier = threading.Barrier(2, timeout=30)

    def gather(item: Any, world: World) -> list[Any]:
        slots[world.rank] = item
        barrier.wait()
        found = list(slots)
        barrier.wait()
        return found

    def on_main(world: World, action: Callable[[], None]) -> None:
        if world.is_main:
            action()
        gather(None, world)

    monkeypatch.setattr(shared_folder, "gather", gather)
    monkeypatch.setattr(shared_folder, "on_main", on_main)
    monkeypatch.setenv("LOCAL_RANK", "0")

    def check(*files: Path) -> list[BaseException | None]:
        worlds = [World(rank, 2, torch.device("cpu"), rank, 2) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            ranks = [pool.submit(check_shared, file, world, 0.0) for file, world in zip(files, worlds, strict=True)]
        return [rank.exception() for rank in ranks]

    return check


def test_one_folder_for_all(check: Callable[..., list[BaseException | None]], tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    assert check(file, file) == [None, None]
    assert check(file, file) == [None, None]  # of an earlier start, too


@pytest.mark.parametrize("there", [None, "a token of an earlier start"])
def test_a_node_with_a_folder_of_its_own(
    there: str | None, check: Callable[..., list[BaseException | None]], tmp_path: Path
) -> None:
    other = tmp_path / "other" / ".lock"
    other.parent.mkdir()
    if there is not None:
        other.write_text(there)
    for error in check(tmp_path / ".lock", other):
        assert isinstance(error, ConfigError)
        assert "(rank 1)" in str(error)
        assert "give a run_dir on a file system that all nodes share" in str(error)


def test_processes_of_one_node_do_not_ask(
    check: Callable[..., list[BaseException | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert check(tmp_path / ".lock", tmp_path / "nowhere" / ".lock") == [None, None]


def test_one_process_writes_nothing(tmp_path: Path) -> None:
    check_shared(tmp_path / ".lock", World(0, 1, torch.device("cpu"), 0, 1))
    assert list(tmp_path.iterdir()) == []
