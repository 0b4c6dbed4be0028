"""FP8 codes against the reference quantizer, bit for bit, on a GPU or (as a program) in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.precision.kernels.fp8_checks
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_train.precision import QuantSpec, quantize
from nvfp4_train.precision.kernels import fp8_launch
from nvfp4_train.precision.quantizer import Quantized
from tests.precision.kernels.checks import edges, matrix

HISTORY = torch.tensor(1.3)
SPECS = (
    QuantSpec("fp8_current", element="e4m3"),
    QuantSpec("fp8_current", element="e5m2"),
    QuantSpec("fp8_delayed", element="e4m3"),
    QuantSpec("fp8_block"),
    QuantSpec("fp8_block", power_of_two=True),
    QuantSpec("fp8_block", (128, 128)),
)


def stored_scales(reference: Quantized) -> Tensor:
    """The reference's scales in the layouts that GEMMs read."""
    if reference.scales is None:
        assert reference.tensor_scale is not None
        return reference.tensor_scale
    if reference.spec.tile == (1, 128):
        return reference.scales.t()
    return torch.nn.functional.pad(reference.scales, (0, -reference.scales.shape[1] % 4))


def same(found: fp8_launch.Codes, operand: Tensor, spec: QuantSpec, codes: Tensor) -> bool:
    """Equal codes and scales; where a scale is NaN, so is all that it scales."""
    reference = quantize(operand, spec, amax=HISTORY if spec.format == "fp8_delayed" else None)
    scale = stored_scales(reference)
    if not torch.equal(found.scale.cpu().nan_to_num(-1), scale.nan_to_num(-1)):
        return False
    shown = reference.dequantize().isfinite()
    return codes.is_contiguous() and torch.equal(
        torch.where(shown, codes.cpu().float(), 0.0), torch.where(shown, reference.codes.float(), 0.0)
    )


def differences(x: Tensor, device: str, alone: bool = True) -> list[str]:
    """Which ways of quantizing x [M, N] on `device` differ from the reference on the CPU; M may be ragged.

    `alone`: each layout by itself, too.
    """
    different = []
    for spec in SPECS:
        if spec.tile == (128, 128) and len(x) % 16:
            continue
        filled = torch.nn.functional.pad(x, (0, 0, 0, fp8_launch.padded_rows(len(x)) - len(x)))
        delayed = spec.format == "fp8_delayed"
        ways = [(spec, spec), (spec, None), (None, spec)] if alone else [(spec, spec)]
        for way in ways:
            amax, seen = (HISTORY.to(device), torch.zeros((), device=device)) if delayed else (None, None)
            first, second = fp8_launch.quantize_codes(x.to(device), *way, amax, seen)
            assert [first is None, second is None] == [wanted is None for wanted in way]
            if first is not None and not same(first, filled, spec, first.values):
                different.append(f"along columns: {spec}")
            if second is not None and not same(second, filled.t().contiguous(), spec, second.values):
                different.append(f"along rows: {spec}")
            if seen is not None and not torch.equal(seen.cpu().nan_to_num(-1), x.abs().amax().float().nan_to_num(-1)):
                different.append(f"amax: {spec}")
    return different


def cases() -> list[tuple[str, Tensor]]:
    """Edge cases and random matrices, with ragged tokens and with widths that end in a part of a block."""
    found = [(name, x.repeat(4, 2)[:, :128].contiguous()) for name, x in edges()]
    for shape in ((256, 384), (144, 160), (100, 128)):
        for dtype in (torch.bfloat16, torch.float32):
            found.append((f"{shape} {dtype}", matrix(*shape, sum(shape), dtype)))
    return found


def main() -> None:
    """Checks in this process; exits with 1 and says what differs."""
    # The interpreter is slow.
    few = [(name, x) for name, x in cases() if not name.endswith(" bf16") and len(x) <= 144]
    failed = [f"{name}: {found}" for name, x in few for found in differences(x, "cpu", alone=len(x) == 100)]
    print("\n".join([*failed, f"{len(few)} matrices, {len(failed)} differences"]))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
