"""A run folder that a node does not share is found at the start. Ranks are threads here, each a node of its own."""

from __future__ import annotations

import re
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
from nvfp4_train.shared_folder import check_same_checkpoint, check_shared

Check = Callable[..., list[BaseException | None]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Check:
    """`ranks(call, arguments of rank 0, arguments of rank 1)`: what `call(*arguments, world, patience)` raises."""
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

    def run(call: Callable[..., None], *arguments: tuple[Path | None, ...]) -> list[BaseException | None]:
        worlds = [World(rank, 2, torch.device("cpu"), rank, 2) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            started = [pool.submit(call, *own, world, 0.0) for own, world in zip(arguments, worlds, strict=True)]
        return [rank.exception() for rank in started]

    return run


@pytest.fixture
def check(ranks: Check) -> Check:
    """`check(file of rank 0, file of rank 1)`: what each rank raises."""
    return lambda *files: ranks(check_shared, *((file,) for file in files))


def test_one_folder_for_all(check: Check, tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    assert check(file, file) == [None, None]
    assert check(file, file) == [None, None]  # of an earlier start, too


@pytest.mark.parametrize("there", [None, "a token of an earlier start"])
def test_a_node_with_a_folder_of_its_own(there: str | None, check: Check, tmp_path: Path) -> None:
    other = tmp_path / "other" / ".lock"
    other.parent.mkdir()
    if there is not None:
        other.write_text(there)
    for error in check(tmp_path / ".lock", other):
        assert isinstance(error, ConfigError)
        assert "(rank 1)" in str(error)
        assert "give a run_dir on a file system that all nodes share" in str(error)


def test_processes_of_one_node_do_not_ask(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert check(tmp_path / ".lock", tmp_path / "nowhere" / ".lock") == [None, None]


def test_one_process_writes_nothing(tmp_path: Path) -> None:
    check_shared(tmp_path / ".lock", World(0, 1, torch.device("cpu"), 0, 1))
    assert list(tmp_path.iterdir()) == []


def checkpoints(folder: Path, newest: int | None, sums: str = "sums") -> tuple[Path, Path]:
    """A folder of checkpoints as far as it is compared, and the checkpoint to start from."""
    start = folder / "step-00000002"
    start.mkdir(parents=True)
    (start / "integrity.json").write_text(sums)
    if newest is not None:
        (folder / "latest").write_text(f"step-{newest:08d}\n")
    return folder, start


def test_nodes_that_see_the_same_checkpoints(ranks: Check, tmp_path: Path) -> None:
    one = checkpoints(tmp_path / "one", 2)
    assert ranks(check_same_checkpoint, one, one) == [None, None]
    assert ranks(check_same_checkpoint, (tmp_path / "new", None), (tmp_path / "new", None)) == [None, None]


def test_nodes_that_see_other_checkpoints(ranks: Check, tmp_path: Path) -> None:
    """An older one as the newest, another one of the same step, none at all."""
    mine = checkpoints(tmp_path / "mine", 4)
    nothing = tmp_path / "nothing"
    others = {
        "sees step 2 as the newest checkpoint": checkpoints(tmp_path / "older", 2),
        "with sums": checkpoints(tmp_path / "another", 4, "others"),
        "sees no checkpoint and step-00000002 not at all": (nothing, nothing / "step-00000002"),
    }
    for said, other in others.items():
        for error in ranks(check_same_checkpoint, mine, other):
            assert isinstance(error, ConfigError)
            assert "rank 0 sees step 4 as the newest checkpoint and step-00000002 with sums" in str(error)
            assert re.search(rf"\S+ \(rank 1\) .*{said}", str(error))
