"""Kernels of rotated groups, corrected scales and row scaling against the reference, bit for bit; see `checks.py`.

TRITON_INTERPRET=1 python -m tests.precision.kernels.group_checks
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_train.precision import QuantSpec, quantize_values
from nvfp4_train.precision.kernels import launch
from nvfp4_train.precision.shards import WHOLE, Axis, Shard
from tests.precision.kernels.checks import KEYS, edges, golden, matrix, same

EDEN = QuantSpec("nvfp4", rotation=128, signs="fresh", correction="eden")
DECODE = 0.3721


class Way(NamedTuple):
    """An operand; `decoded`: of x times a tensor scale."""

    spec: QuantSpec
    axis: int
    decoded: bool = False


CORRECTED = (Way(EDEN, 0), Way(EDEN, 1), Way(EDEN, 0, decoded=True), Way(EDEN, 1, decoded=True))
ROTATED = tuple(
    Way(QuantSpec(name, rotation=size, rounding=rounding, signs=signs), axis)
    for name, size, rounding, signs, axis in (
        ("nvfp4", 32, "stochastic", "fixed", 0),
        ("nvfp4", 32, "nearest", "fixed", 0),
        ("nvfp4", 64, "stochastic", "fixed", 0),
        ("nvfp4", 64, "nearest", "fresh", 1),
        ("nvfp4", 128, "stochastic", "fixed", 0),
        ("nvfp4", 128, "nearest", "fixed", 0),
        ("nvfp4", 128, "stochastic", "fresh", 1),
        ("nvfp4", 16, "stochastic", "fresh", 0),
        ("mxfp4", 16, "stochastic", "fixed", 0),
        ("mxfp4", 64, "nearest", "fixed", 0),
    )
)
ROWS = tuple(Way(QuantSpec("nvfp4", scaling="row", four_over_six=measure), 1) for measure in ("mse", "mae", None))
WAYS = (*CORRECTED, *ROTATED, *ROWS)
# Two pieces of the contraction and one or two of the other dimension, in an order of their own.
ALONG_ROWS = Shard(Axis(512, ((256, 128), (0, 128))), Axis(96, ((48, 48),)))
ALONG_COLUMNS = Shard(Axis(96, ((48, 16), (0, 32))), Axis(384, ((256, 128),)))


def differences(x: Tensor, device: str, ways: tuple[Way, ...] = WAYS, shard: Shard = WHOLE) -> list[str]:
    """Which ways of quantizing x, or x as a part of a matrix, on `device` differ from the reference on the CPU.

    Ways whose groups x is no multiple of are passed over.
    """
    different = []
    for spec, axis, decoded in ways:
        if not launch.serves(x, spec, axis, shard) or (decoded and x.dtype != torch.bfloat16):
            continue
        decode = torch.tensor(DECODE, device=device) if decoded else None
        found = launch.quantize_operand(x.to(device), spec, axis, KEYS[0], shard, None, KEYS[1], decode)
        source = x.float() * DECODE if decoded else x
        expected = quantize_values(source, spec, key=KEYS[0], axis=axis, sign_key=KEYS[1], shard=shard)
        if not same(found, expected):
            different.append(f"axis {axis}{', decoded' if decoded else ''}: {spec}")
    return different


def inputs() -> Iterator[tuple[str, Tensor]]:
    """The golden inputs and the edges, repeated to 128 x 128."""
    for name, x in (*golden(), *edges()):
        yield name, x.repeat(-(-128 // x.shape[0]), -(-128 // x.shape[1]))[:128, :128].contiguous()


def main() -> None:
    """Checks on small matrices in this process; exits with 1 and says what differs."""
    named = dict(inputs())
    cases = [
        ("BF16, along rows", matrix(128, 48, 1, torch.bfloat16), (CORRECTED[0], CORRECTED[2], *ROTATED[2::3])),
        ("BF16, along columns", matrix(48, 128, 2, torch.bfloat16), (CORRECTED[1], ROTATED[3], *ROWS)),
        ("FP32, along rows", matrix(128, 16, 3, torch.float32), (CORRECTED[0], ROTATED[2])),
        ("FP32, along columns", matrix(16, 128, 4, torch.float32), (CORRECTED[1], ROWS[0])),
        *(
            (name, named[name][:, :16].contiguous(), CORRECTED[:1])
            for name in ("nan", "huge", "denormal bf16", "zeros_64x64_bf16", "smallblocks_64x64_f32")
        ),
        *((name, named[name][:16].contiguous(), ROWS[:1]) for name in ("minus inf bf16", "denormal")),
    ]
    failed = [f"{name}: {found}" for name, x, ways in cases for found in differences(x, "cpu", ways)]
    failed += [f"part: {found}" for found in parts("cpu")]
    print("\n".join([*failed, f"{len(cases) + 2} matrices, {len(failed)} differences"]))
    raise SystemExit(bool(failed))


def parts(device: str) -> list[str]:
    """Differences of parts of matrices."""
    rows, columns = (matrix(*shape, 7, torch.bfloat16) for shape in ((256, 48), (48, 128)))
    along_rows = differences(rows, device, (CORRECTED[0], ROTATED[0]), ALONG_ROWS)
    return along_rows + differences(columns, device, (CORRECTED[1], ROWS[0]), ALONG_COLUMNS)


if __name__ == "__main__":
    main()
