"""The native path of a whole linear against its emulation, with FP8 codes from Triton's interpreter (as a program).

TRITON_INTERPRET=1 python -m tests.precision.kernels.native_checks

The FP8 GEMM, which a CPU has not, is stood in for by FP32 products of decoded operands in cuBLASLt's layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_train.precision.delayed import AmaxHistories
from nvfp4_train.precision.kernels import cublaslt
from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.runtime import PrecisionRuntime
from nvfp4_train.precision.three_gemms import ThreeGemms
from tests.precision.linears import precision, tensors

# In-features and out-features: whole blocks of 128, and widths whose last block is a part of one.
WHOLE, RAGGED = (256, 128), (272, 208)
RECIPES = ("fp8_block", "fp8_current", "fp8_delayed")
# Tokens, whether health is sampled, sizes.
CASES = ((128, False, WHOLE), (72, False, RAGGED), (128, True, WHOLE))


def decoded(codes: Tensor, scale: Tensor) -> Tensor:
    """An operand [rows, K] from its codes and scales."""
    assert codes.is_contiguous()
    values = codes.float()
    if scale.dim() == 0:
        return values * scale
    rows, contraction = codes.shape
    if scale.shape == (-(-contraction // 128), rows):
        return values * scale.t().repeat_interleave(128, 1)[:, :contraction]
    return values * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :contraction]


def fp8_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out: Tensor, accumulate: bool = False) -> Tensor:
    """`cublaslt.fp8_mm` in FP32."""
    product = decoded(a, scale_a) @ decoded(b, scale_b).t()
    return out.copy_(out + product if accumulate else product)


def passes(
    name: str, device: str, native: bool, tokens: int, sampled: bool = False, sizes: tuple[int, int] = WHOLE
) -> tuple[Tensor, ...]:
    """Y, dX and dW (added twice to a buffer) of one linear in the second step, and its amax histories."""
    x, w, dy = (t.to(device) for t in tensors(tokens=tokens, sizes=sizes))
    runtime = PrecisionRuntime(5, native=native)
    assignment = precision(name, sizes=sizes)
    gemms = ThreeGemms(assignment, runtime)
    runtime.histories = AmaxHistories(gemms.delayed_tensors(), 4, torch.device(device))
    runtime.expect([gemms.name])
    runtime.sample_health = sampled
    buffer = torch.zeros_like(w)
    for step in (1, 2):
        runtime.begin_step(step, Passes("recipe", "recipe"))
        runtime.begin_microbatch(0)
        call = runtime.call()
        y, kept = gemms.forward(x, w, None, call)
        along_out, along_tokens = gemms.gradients(dy, call, True, True)
        assert along_out is not None
        assert along_tokens is not None
        dx = gemms.input_gradient(along_out, w, call, tokens)
        gemms.weight_gradient(along_tokens, kept, call, buffer)
        runtime.end_step()
    runtime.check_observed([assignment], Passes("recipe", "recipe"))
    histories = [h.cpu() for h in runtime.state_dict().values()]
    return y.cpu(), dx.cpu(), buffer.cpu(), *histories


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def main() -> None:
    """Checks in this process; exits with 1 and says what differs."""
    cublaslt.fp8_mm = fp8_mm
    failed = []
    for name in RECIPES:
        for tokens, sampled, sizes in CASES:
            found, expected = (passes(name, "cpu", native, tokens, sampled, sizes) for native in (True, False))
            errors = [error(*pair) for pair in zip(found, expected, strict=True)]
            # Both round the same FP32 sums, taken in another order, to BF16.
            if len(errors) != (6 if name == "fp8_delayed" else 3) or not max(errors) < 1e-3 or max(errors[2:]) > 1e-6:
                failed.append(f"{name}, {tokens} tokens, sampled {sampled}, {sizes}: {errors}")
    print("\n".join([*failed, f"{len(failed)} differences"]))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
