"""mamba-ssm's kernels run in the tiles of our table, or in their smallest, never in what a machine finds fastest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from models import mamba_tiles
from models.mamba_tiles import TILES, VERSION, Tile, fix_tiles, shared_memory

MODULE = "mamba_ssm.ops.triton.ssd_chunk_state"
H200, CONSUMER = 232448, 101376
CUDA = torch.device("cuda")


def _chunk_state_bwd_db_kernel(x, BLOCK_SIZE_M, BLOCK_SIZE_N):  # type: ignore[no-untyped-def]
    pass


def _kernel_of_a_later_release(x, BLOCK_SIZE_M, BLOCK_SIZE_N):  # type: ignore[no-untyped-def]
    pass


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of mamba-ssm's, loaded before anybody chose, with a kernel that the table knows and one that it doesn't."""

    def clear(arguments: dict[str, Any]) -> None:
        pass

    def tuned(function: Callable[..., None]) -> triton.runtime.Autotuner:
        sizes = ((64, 128, 2), (32, 64, 3), (32, 64, 2))
        tiles = [
            triton.Config({"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n}, num_stages=stages, pre_hook=clear)
            for m, n, stages in sizes
        ]
        return triton.autotune(configs=tiles, key=["x"])(triton.jit(function))

    module: Any = ModuleType(MODULE)
    module.known, module.unknown = tuned(_chunk_state_bwd_db_kernel), tuned(_kernel_of_a_later_release)
    module.wrapped, module.clear = triton.heuristics({})(module.unknown), clear
    del module.unknown
    module._CHUNK_STATE_BWD_DB_MIN_BLOCK_N = 64
    monkeypatch.setitem(sys.modules, MODULE, module)
    set_card(monkeypatch, H200)
    return module


def set_card(monkeypatch: pytest.MonkeyPatch, shared: int) -> None:
    card = SimpleNamespace(name="a card", shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)


def only(kernel: triton.runtime.Autotuner) -> Tile:
    """What a kernel will run in; with a single choice Triton tries nothing."""
    (config,) = kernel.configs
    assert list(config.kwargs) == ["BLOCK_SIZE_M", "BLOCK_SIZE_N"]
    return Tile(tuple(config.kwargs.values()), config.num_warps, config.num_stages)


def test_kernels_get_the_tables_tiles_and_keep_their_hooks(module: Any) -> None:
    assert fix_tiles(f"{VERSION}.post1", 64, CUDA) == "fixed tiles"
    assert only(module.known) == TILES["_chunk_state_bwd_db_kernel"] == Tile((64, 128), 4, 3)
    assert module.known.configs[0].pre_hook is module.clear
    assert only(module.wrapped.fn) == Tile((32, 64), 4, 2)  # not in the table: the smallest


def test_room_for_partial_sums_follows_the_tile(module: Any) -> None:
    fix_tiles(VERSION, 64, CUDA)
    assert module._CHUNK_STATE_BWD_DB_MIN_BLOCK_N == 128
    fix_tiles("9.0", 64, CUDA)
    assert module._CHUNK_STATE_BWD_DB_MIN_BLOCK_N == 64


def test_where_the_table_does_not_hold_the_smallest_run_and_it_is_said(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fix_tiles("2.4.0", 64, CUDA) == f"smallest tiles, which are slower (those of mamba-ssm {VERSION} are known)"
    assert only(module.known) == Tile((32, 64), 4, 2)
    set_card(monkeypatch, CONSUMER)
    assert fix_tiles(VERSION, 64, CUDA) == "fixed tiles"
    assert "heads of 128 need 144 KiB of shared memory a block, a card has 99" in fix_tiles(VERSION, 128, CUDA)
    assert only(module.known) == Tile((32, 64), 4, 2)  # of its own list, which the table had replaced
    assert module.known.configs[0].pre_hook is module.clear
    set_card(monkeypatch, H200)
    assert fix_tiles(VERSION, 128, CUDA) == "fixed tiles"
    assert "smallest" in fix_tiles(VERSION, 256, CUDA)


def test_shared_memory_as_the_compiler_counts_it() -> None:
    # mamba-ssm 2.3.2's kernels for compute capability 9.0: the largest of all, _chunk_state_bwd_db_kernel.
    assert [shared_memory(head_dim) for head_dim in (16, 64, 128)] == [73984, 73984, 147712]
    assert shared_memory(80) == shared_memory(128)


def test_no_kernel_of_another_package_is_touched(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mamba_ssm_like", module)
    monkeypatch.delitem(sys.modules, MODULE)
    fix_tiles(VERSION, 64, CUDA)
    assert len(module.known.configs) == 3
    assert list(mamba_tiles._kernels()) == []
