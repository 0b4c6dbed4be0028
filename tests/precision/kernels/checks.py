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
from nvfp4_train.precision.kernels.buffers import Made
from nvfp4_train.precision.quantizer import Values
from nvfp4_train.precision.shards import WHOLE, Axis, Shard

GOLDEN = Path(__file__).parents[2] / "golden"
KEYS = 0x123456789ABCDEF0, 0xFEDCBA9876543210
NEAREST, ROTATED = QuantSpec("nvfp4"), QuantSpec("nvfp4", rotation=16)
STOCHASTIC = QuantSpec("nvfp4", rounding="stochastic")
ROTATED_STOCHASTIC = QuantSpec("nvfp4", rounding="stochastic", rotation=16)
MSE, MAE = QuantSpec("nvfp4", four_over_six="mse"), QuantSpec("nvfp4", four_over_six="mae")
MX4, MX4_STOCHASTIC = QuantSpec("mxfp4"), QuantSpec("mxfp4", rounding="stochastic")
MX4_OCP = QuantSpec("mxfp4", scale_rounding="ocp")
MX4_ROTATED = QuantSpec("mxfp4", rotation=32)
MX4_ROTATED_STOCHASTIC = QuantSpec("mxfp4", rounding="stochastic", rotation=32)
MX8, MX8_OCP = QuantSpec("mxfp8"), QuantSpec("mxfp8", scale_rounding="ocp")
FP8, FP8_POWER = QuantSpec("fp8_block"), QuantSpec("fp8_block", power_of_two=True)
Pair = tuple[QuantSpec | None, QuantSpec | None]
# Operands along the columns and along the rows, from one read; the first of each format is that of its recipe.
PAIRS: tuple[Pair, ...] = (
    (NEAREST, ROTATED),
    (STOCHASTIC, ROTATED_STOCHASTIC),
    (NEAREST, NEAREST),
    (STOCHASTIC, STOCHASTIC),
    (NEAREST, None),
    (None, ROTATED_STOCHASTIC),
    (MSE, ROTATED),
    (MAE, None),
    (MX4, MX4_ROTATED),
    (MX4_STOCHASTIC, MX4_ROTATED_STOCHASTIC),
    (MX4_OCP, MX4_STOCHASTIC),
    (MX8, MX8),
    (MX8_OCP, MX8_OCP),
    (FP8, FP8),
    (FP8_POWER, FP8_POWER),
    (None, FP8),
)
# One operand that serves both contractions.
SQUARE = QuantSpec("nvfp4", (16, 16))
SHARED: tuple[QuantSpec, ...] = (
    SQUARE,
    QuantSpec("nvfp4", (16, 16), four_over_six="mse"),
    QuantSpec("nvfp4", (16, 16), four_over_six="mae"),
    QuantSpec("mxfp4", (32, 32)),
    QuantSpec("mxfp8", (32, 32)),
    QuantSpec("fp8_block", (128, 128)),
    QuantSpec("fp8_current"),
    QuantSpec("fp8_current", element="e5m2"),
    QuantSpec("fp8_delayed"),
)
NVFP4 = PAIRS[:6]
# For the interpreter, which is slow: one way of each kernel.
FEW: tuple[Pair, ...] = tuple(PAIRS[i] for i in (6, 8, 11))
# Two pieces of the rows, one of the columns, of a matrix [96, 288], in an order of their own.
PART = Shard(Axis(96, ((64, 16), (16, 16))), Axis(288, ((144, 144),)))
# The same with blocks of 32: of a matrix [192, 576].
PART32 = Shard(Axis(192, ((128, 32), (32, 32))), Axis(576, ((288, 288),)))


def equal(found: Tensor, reference: Tensor) -> bool:
    """Equal numbers; NaN equals NaN."""
    return bool(((found == reference) | (found.isnan() & reference.isnan())).all())


def same(found: Made, reference: Values) -> bool:
    """Equal values, scale and amax. A tensor that is not finite is NaN through its scale, whatever the values."""
    values = reference.values.to(found.values.dtype)
    if found.scale is None or found.amax is None:
        return reference.scale is None and equal(found.values.cpu(), values)
    assert reference.scale is not None
    if not equal(found.amax.cpu(), reference.amax) or not equal(found.scale.cpu(), reference.scale):
        return False
    # Of one scale for all, or of one for each row.
    seen = ~reference.scale.isnan() if reference.scale.dim() == 0 else ~reference.scale.isnan()[:, None]
    return bool(((found.values.cpu() == values) | ~seen).all())


def differences(
    x: Tensor,
    device: str,
    pairs: tuple[Pair, ...] = PAIRS,
    shared: tuple[QuantSpec, ...] = SHARED,
    shard: Shard = WHOLE,
) -> list[str]:
    """Which ways of quantizing x, or x as a part of a matrix, on `device` differ from the reference on the CPU.

    Ways whose blocks x is no multiple of are passed over.
    """
    different = []
    on_device = x.to(device)
    for pair in pairs:
        if not all(spec is None or launch.serves(x, spec, 1 - i, shard) for i, spec in enumerate(pair)):
            continue
        made = launch.quantize_rows_and_columns(on_device, *pair, *KEYS, shard)
        for found, spec, key, axis in zip(made, pair, KEYS, (1, 0), strict=True):
            assert (found is None) == (spec is None)
            if found and spec and not same(found, quantize_values(x, spec, key=key, axis=axis, shard=shard)):
                different.append(f"axis {axis} of {[spec and spec.rounding for spec in pair]}: {spec}")
    for spec in shared:
        if launch.serves(x, spec, 1, shard):
            amax = torch.tensor(2.5) if spec.format == "fp8_delayed" else None
            there = None if amax is None else amax.to(device)
            found = launch.quantize_operand(on_device, spec, 1, 0, shard, there)
            if not same(found, quantize_values(x, spec, amax=amax, shard=shard)):
                different.append(str(spec))
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
    """Non-finite numbers, huge and tiny ones, blocks beside an outlier, denormal block scales, every E2M1 tie."""
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
    small = base * torch.exp2(-18 * torch.rand(32, 6, generator=generator)).repeat_interleave(16, 1)
    small[0, 0] = 40
    yield "denormal scales", small
    yield "denormal scales bf16", small.bfloat16()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    yield "ties", torch.cat([ties, -ties]).repeat(16, 4)


def matrix(rows: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, rows of different sizes, a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator).exp2()
    return torch.where(torch.rand(rows, columns, generator=generator) < 0.001, x * 50, x).to(dtype)


def fuse() -> None:
    """Let Triton's interpreter round an fma once, as the hardware does: it rounds the product too."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def fma(self: object, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        exact = x.data.astype(np.float64) * y.data + z.data
        return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    InterpreterBuilder.create_fma = fma


def main() -> None:
    """Checks on small matrices in this process; exits with 1 and says what differs."""
    fuse()
    inputs = dict(golden()) | dict(edges())
    cases = [
        (name, x[:16].contiguous(), NVFP4[:1], SHARED[:1])
        for name, x in inputs.items()
        if not ({name.replace("_f32", "_bf16"), f"{name} bf16"} - {name}) & inputs.keys()
    ]
    cases.append(("denormal", inputs["denormal"], FEW, ()))
    cases.append(("nan", inputs["nan bf16"], (), SHARED))
    cases.append(("denormal scales", inputs["denormal scales bf16"], PAIRS[6:8], SHARED[1:3]))
    cases.append(("beside an outlier", inputs["bf16max_one_64x64_f32"][:32], (PAIRS[1], PAIRS[6]), SHARED[1:2]))
    cases.append(("bf16", matrix(32, 64, 1, torch.bfloat16), (PAIRS[1], *PAIRS[6:13]), SHARED))
    cases.append(("FP32", matrix(32, 32, 2, torch.float32), (PAIRS[1], PAIRS[9]), SHARED[:2]))
    cases.append(("whole tiles", matrix(32, 256, 4, torch.bfloat16), (PAIRS[1], PAIRS[9]), ()))
    cases.append(("160 x 144", matrix(160, 144, 3, torch.bfloat16), PAIRS[-3:], SHARED[-4:-3]))
    failed = [f"{name}: {found}" for name, x, *ways in cases for found in differences(x, "cpu", *ways)]
    for shard, pair in ((PART, PAIRS[1:2]), (PART32, PAIRS[9:10])):
        rows, columns = (axis.length for axis in shard if axis is not None)
        part = matrix(rows, columns, 7, torch.bfloat16)
        failed += [f"part: {found}" for found in differences(part, "cpu", pair, SHARED[:1], shard)]
    print("\n".join([*failed, f"{len(cases)} matrices, {len(failed)} differences"]))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
