"""In which tiles mamba-ssm's Triton kernels run: the same on every machine, so that every machine adds in one order.

Left to themselves the kernels try each of their tiles when they first run, for about 100 s, and keep the fastest there.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

VERSION = "2.3.2"  # of mamba-ssm, in which the table was measured


class Tile(NamedTuple):
    """How much of its result a kernel's block computes at once, and with what.

    Attributes:
        sizes: BLOCK_SIZE_* in the order in which the kernel lists them.
        warps, stages: of 32 threads each, and of loads in flight.
    """

    sizes: tuple[int, ...]
    warps: int
    stages: int


# On an H200 the kernels of a layer together take 2% longer in these than each in the fastest of 15 to 25 tiles, for 64
# and for 160 heads of 64 channels with a state of 128; 5% for 16 heads of 32 with a state of 124.
TILES = {
    "_bmm_chunk_fwd_kernel": Tile((128, 128, 64), 8, 2),
    "_bmm_chunk_bwd_kernel": Tile((64, 128, 32), 4, 4),
    "_chunk_cumsum_fwd_kernel": Tile((8,), 4, 3),
    "_chunk_cumsum_bwd_kernel": Tile((8,), 2, 3),
    "_chunk_scan_fwd_kernel": Tile((64, 64, 32), 4, 3),
    "_chunk_scan_bwd_dz_kernel": Tile((64,), 4, 3),
    "_chunk_scan_bwd_dc_kernel": Tile((64, 128), 4, 3),
    "_chunk_scan_bwd_dcb_kernel": Tile((32, 32), 4, 3),
    "_chunk_scan_bwd_dstates_kernel": Tile((64, 128, 32), 4, 4),
    "_chunk_scan_bwd_ddAcs_stable_kernel": Tile((64, 32), 4, 3),
    "_chunk_scan_chunk_state_bwd_dx_kernel": Tile((64, 64, 32), 4, 3),
    "_chunk_state_fwd_kernel": Tile((64, 64, 32), 2, 4),
    "_chunk_state_bwd_db_kernel": Tile((64, 128), 4, 3),
    "_state_passing_fwd_kernel": Tile((512,), 4, 3),
    "_state_passing_bwd_kernel": Tile((512,), 4, 3),
}


def shared_memory(head_dim: int) -> int:
    """Bytes that a block of the largest tile holds: dB's and dC's three stages of (64 + 128) rows of a head, padded to
    a power of two, in BF16; up to 64 channels no tile holds more than it does at 64.
    """
    padded = 1 << (max(head_dim, 64) - 1).bit_length()
    return 2 * 3 * (64 + 128) * padded + 256


def fix_tiles(version: str, head_dim: int, device: torch.device) -> str:
    """Gives every kernel of mamba-ssm that is loaded one tile, for all models of this process: that of the table, or
    its smallest where the table does not hold.

    Args:
        version: mamba-ssm's.
        head_dim: channels of a head.
        device: a CUDA device.

    Returns:
        Which, in words.
    """
    card: Any = torch.cuda.get_device_properties(device)
    needed, there = shared_memory(head_dim), card.shared_memory_per_block_optin
    why = ""
    if version.split(".post")[0] != VERSION:
        why = f"those of mamba-ssm {VERSION} are known"
    elif needed > there:
        why = f"heads of {head_dim} need {needed // 1024} KiB of shared memory a block, {card.name} has {there // 1024}"
    for module, kernel in _kernels():
        smallest = _smallest(kernel)
        tile = None if why else TILES.get(kernel.base_fn.__name__)
        chosen = smallest if tile is None else _like(smallest, tile)
        kernel.configs = [chosen]
        # Room for partial sums, one a tile: mamba-ssm counts it by the narrowest tile that it may try.
        narrowest = f"{kernel.base_fn.__name__.removesuffix('_kernel').upper()}_MIN_BLOCK_N"
        if hasattr(module, narrowest):
            setattr(module, narrowest, chosen.kwargs["BLOCK_SIZE_N"])
    return f"smallest tiles, which are slower ({why})" if why else "fixed tiles"


def _kernels() -> Iterator[tuple[ModuleType, Any]]:
    """Kernels of mamba-ssm's loaded modules that choose among tiles, each with the module where it stands."""
    interface, tuned = (importlib.import_module(f"triton.runtime.{name}") for name in ("jit", "autotuner"))
    for module in [module for name, module in sys.modules.items() if name.startswith("mamba_ssm.")]:
        for kernel in list(vars(module).values()):
            while isinstance(kernel, interface.KernelInterface):
                if isinstance(kernel, tuned.Autotuner):
                    yield module, kernel
                kernel = getattr(kernel, "fn", None)


def _like(config: Any, tile: Tile) -> Any:
    """A triton.Config of the table's sizes; the kernel's own says their names and which sums it has to clear first."""
    sizes = dict(zip(config.kwargs, tile.sizes, strict=True))
    return type(config)(sizes, num_warps=tile.warps, num_stages=tile.stages, pre_hook=config.pre_hook)


@cache  # afterwards a kernel lists nothing but the chosen one
def _smallest(kernel: Any) -> Any:
    """Of the tiles that a kernel lists, the one that holds the fewest elements at once; it fits every card."""

    def elements(config: Any) -> int:
        sizes = [size for name, size in config.kwargs.items() if name.startswith("BLOCK_SIZE")]
        return math.prod(sizes) * int(config.num_stages)

    return min(kernel.configs, key=elements)
