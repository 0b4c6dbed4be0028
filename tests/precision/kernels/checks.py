"""Kernels against the reference quantizers, bit for bit, on a GPU or (as a program) in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so it needs a process of its own:
TRITON_INTERPRET=1 python -m tests.precision.kernels.checks
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nvfp4_train.precision import QuantSpec, quantize_values
from nvfp4_train.precision.kernels import launch
from nvfp4_train.precision.quantizer import Values
from nvfp4_train.precision.shards import WHOLE, Axis, Shard

GOLDEN = Path(__file__).parents[2] / "golden"
KEYS = 0x123456789ABCDEF0, 0xFEDCBA9876543210
NEAREST, STOCHASTIC, SQUARE = (
    QuantSpec("nvfp4"),
    QuantSpec("nvfp4", rounding="stochastic"),
    QuantSpec("nvfp4", (16, 16)),
)
ROTATED = QuantSpec("nvfp4", rotation=16)
ROTATED_STOCHASTIC = QuantSpec("nvfp4", rounding="stochastic", rotation=16)
Pair = tuple[QuantSpec | None, QuantSpec | None]
PAIRS: tuple[Pair, ...] = (
    (NEAREST, ROTATED),
    (STOCHASTIC, ROTATED_STOCHASTIC),
    (NEAREST, NEAREST),
    (STOCHASTIC, STOCHASTIC),
    (NEAREST, None),
    (None, ROTATED_STOCHASTIC),
)


def same(found: launch.Made, reference: Values) -> bool:
    """Equal values, scale and amax. A tensor that is not finite is NaN through its scale, whatever the values."""
    scale = found.scale.cpu()
    equal = torch.equal(found.amax.cpu(), reference.amax) or bool(found.amax.isnan() and reference.amax.isnan())
    if bool(scale.isnan()):
        return equal and reference.scale is not None and bool(reference.scale.isnan())
    assert reference.scale is not None
    return equal and torch.equal(scale, reference.scale) and torch.equal(found.values.cpu().float(), reference.values)


# Two pieces of the rows, one of the columns, of a matrix [96, 288], in an order of their own.
PART = Shard(Axis(96, ((64, 16), (16, 16))), Axis(288, ((144, 144),)))


def differences(x: Tensor, device: str, pairs: tuple[Pair, ...] = PAIRS, shard: Shard = WHOLE) -> list[str]:
    """Which ways of quantizing x, or x as a part of a matrix, on `device` differ from the reference on the CPU."""
    different = []
    on_device = x.to(device)
    for rows, columns in pairs:
        made = launch.quantize_rows_and_columns(on_device, rows, columns, *KEYS, shard)
        for found, spec, key, axis in zip(made, (rows, columns), KEYS, (1, 0), strict=True):
            assert (found is None) == (spec is None)
            if found and spec and not same(found, quantize_values(x, spec, key=key, axis=axis, shard=shard)):
                different.append(f"axis {axis} of {rows and rows.rounding}, {columns and columns.rounding}: {spec}")
    if not same(launch.quantize_square(on_device), quantize_values(x, SQUARE)):
        different.append("16x16")
    return different


def golden() -> Iterator[tuple[str, Tensor]]:
    """Inputs of the golden vectors whose sizes the kernels take; the reference quantizers have their bits."""
    for path in sorted(GOLDEN.glob("*.npz")):
        if not path.name.startswith(("fos_", "gemm_", "pad_")):
            array = np.load(path)["x"]
            bf16 = array.dtype == np.uint16
            yield (
                path.stem,
                torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
                if bf16
                else (torch.from_numpy(array)),
            )


def edges() -> Iterator[tuple[str, Tensor]]:
    """Non-finite numbers, huge and tiny ones, blocks beside an outlier, every E2M1 tie."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(32, 96, generator=generator)
    for name, place, value in (
        ("nan", (3, 40), torch.nan),
        ("inf", (31, 95), torch.inf),
        ("minus inf", (0, 0), -torch.inf),
        ("outlier", (17, 33), 1e9),
    ):
        x = base.clone()
        x[place] = value
        yield name, x
        yield f"{name} bf16", x.bfloat16()
    for name, size in (("huge", 2.0**125), ("tiny", 2.0**-126), ("denormal", 2.0**-140)):
        yield name, base * size
        yield f"{name} bf16", (base * size).bfloat16()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    yield "ties", torch.cat([ties, -ties]).repeat(16, 4)


def matrix(rows: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, rows of different sizes, a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator).exp2()
    return torch.where(torch.rand(rows, columns, generator=generator) < 0.001, x * 50, x).to(dtype)


def main() -> None:
    """Checks on small matrices in this process; exits with 1 and says what differs."""
    few = PAIRS[:1]  # the interpreter is slow
    cases = [*((name, x[:16], few) for name, x in golden()), *((name, x, few) for name, x in edges())]
    for shape in ((16, 16), (32, 144)):
        for dtype in (torch.bfloat16, torch.float32):
            cases.append((f"{shape} {dtype}", matrix(*shape, sum(shape), dtype), PAIRS))
    failed = [f"{name}: {found}" for name, x, pairs in cases for found in differences(x, "cpu", pairs)]
    part = matrix(32, 144, 7, torch.bfloat16)
    failed += [f"part: {found}" for found in differences(part, "cpu", PAIRS[1:2], PART)]
    print("\n".join([*failed, f"{len(cases)} matrices, {len(failed)} differences"]))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
