"""Small quantized linears, with and without Megatron's modules, and the plain arithmetic that they must equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.precision.assignment import LinearPrecision, assign
from nvfp4_train.precision.config import Operand
from nvfp4_train.precision.delayed import AmaxHistories
from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.quantizer import Values, quantize_values
from nvfp4_train.precision.rounding import element_key
from nvfp4_train.precision.runtime import PrecisionRuntime
from nvfp4_train.precision.three_gemms import ThreeGemms

from .recipe_files import recipe, shapes

RECIPE = Passes("recipe", "recipe")
BF16 = Operand("bf16")


def precision(
    name: str, *overrides: str, linear: str = "layer", sizes: tuple[int, int] = (256, 128)
) -> LinearPrecision:
    """What a recipe decides for a plain linear [out, in] = reversed `sizes`."""
    config = recipe(name, "bf16_blocks={first: 0, last: 0}", *overrides)
    found = next(a for a in assign(config, shapes("M-*-")) if a.role == "fc1")
    return replace(found, name=linear, in_features=sizes[0], out_features=sizes[1])


def standalone(assignment: LinearPrecision, **options: Any) -> ThreeGemms:
    """The GEMMs of one linear with a runtime of their own, in micro-batch 0 of step 1."""
    runtime = PrecisionRuntime(options.pop("seed", 5), **options)
    gemms = ThreeGemms(assignment, runtime)
    runtime.histories = AmaxHistories(gemms.delayed_tensors(), 4, torch.device("cpu"))
    runtime.expect([assignment.name])
    runtime.begin_step(1, RECIPE)
    runtime.begin_microbatch(0)
    return gemms


def run(gemms: ThreeGemms, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Y, dX and dW of one forward and backward pass where the runtime stands."""
    call = gemms.runtime.call()
    y, kept = gemms.forward(x, w, None, call)
    along_out, along_tokens = gemms.gradients(dy, call, True, True)
    assert along_out is not None
    assert along_tokens is not None
    return y, gemms.input_gradient(along_out, w, call), gemms.weight_gradient(along_tokens, kept, call, None)


def tensors(tokens: int = 128, sizes: tuple[int, int] = (256, 128), seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, in] BF16, w [out, in] FP32, dy [tokens, out] BF16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, sizes[0], generator=generator)
    w = torch.randn(sizes[1], sizes[0], generator=generator) * 0.05
    dy = torch.randn(tokens, sizes[1], generator=generator) * 1e-3
    return x.bfloat16(), w, dy.bfloat16()


def expected(
    assignment: LinearPrecision, x: Tensor, w: Tensor, dy: Tensor, seed: int = 5, step: int = 1, microbatch: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """float64 products of operands quantized one by one, each as a matrix with the contraction along its rows."""

    def quantized(gemm: str, kind: str, matrix: Tensor) -> Values:
        operand = assignment.operands[gemm][kind]
        key, sign_key = (
            element_key(seed, step, microbatch, assignment.name, f"{gemm}.{name}") for name in (kind, "signs")
        )
        return quantize_values(matrix.contiguous(), operand, key=key, sign_key=sign_key)

    def factor(gemm: str, kind: str, matrix: Tensor) -> Tensor:
        if assignment.operands[gemm][kind].source == "decoded":
            forward = quantized("fprop", kind, matrix.t()).dequantize()
            matrix = forward.t()
        return quantized(gemm, kind, matrix).dequantize().double()

    y = factor("fprop", "input", x) @ factor("fprop", "weight", w).t()
    dx = factor("dgrad", "gradient", dy) @ factor("dgrad", "weight", w.t()).t()
    dw = factor("wgrad", "gradient", dy.t()) @ factor("wgrad", "input", x.t()).t()
    return y, dx, dw


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    """`found` is `exact` up to FP32 accumulation and one rounding to its dtype."""
    assert found.shape == exact.shape
    noise = 2e-6 * float(exact.abs().max())
    rounding = 2.0**-8 if found.dtype == torch.bfloat16 else 2.0**-22
    wrong = (found.double() - exact).abs() > exact.abs() * rounding + noise
    assert not wrong.any(), (found[wrong][:5], exact[wrong][:5])


def module(
    kind: str = "column", sizes: tuple[int, int] = (256, 128), seed: int = 0, bias: bool = False, **options: Any
) -> Any:
    """One of Megatron's linears with our GEMMs and seeded weights, not attached. Needs the fixture `single_process`."""
    from megatron.core.transformer import TransformerConfig

    from nvfp4_train.precision.linear import QuantizedColumnParallelLinear, QuantizedRowParallelLinear

    config = TransformerConfig(
        num_layers=1,
        hidden_size=sizes[0],
        num_attention_heads=1,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,
    )
    common = {"config": config, "init_method": torch.nn.init.zeros_, "bias": bias, "skip_bias_add": False}
    if kind == "column":
        made = QuantizedColumnParallelLinear(*sizes, **common, gather_output=False, **options)
    else:
        made = QuantizedRowParallelLinear(*sizes, **common, input_is_parallel=True, **options)
    if made.weight is not None:
        made.weight.data.copy_(tensors(sizes=sizes, seed=seed)[1])
    if bias:
        made.bias.data.copy_(torch.linspace(-1, 1, sizes[1]))
    return made


def attached(made: Any, assignment: LinearPrecision, **options: Any) -> PrecisionRuntime:
    """A runtime of its own for one module, in micro-batch 0 of step 1."""
    from nvfp4_train.precision.linear import attach

    runtime = PrecisionRuntime(options.pop("seed", 5), **options)
    attach({assignment.name: made}, [assignment], runtime)
    runtime.begin_step(1, RECIPE)
    runtime.begin_microbatch(0)
    return runtime
