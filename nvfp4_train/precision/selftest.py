"""Before a run: does every GEMM that it will use compute what it should, on this device?

A kernel that returns zeros on a GPU nobody tried trains happily on zero gradients. So each distinct set of operands
runs one small forward and backward pass, compared with plain float64 products within what the formats can explain. On
another device than a CPU, each quantizing kernel of the run must have the bits of the reference, and the pass must
agree with that on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nvfp4_train.precision.assignment import LinearPrecision
from nvfp4_train.precision.config import PrecisionError, QuantSpec
from nvfp4_train.precision.delayed import AmaxHistories
from nvfp4_train.precision.formats import FP8_FORMATS, element_of
from nvfp4_train.precision.operands import AXES, has_kernel, made_together, quantize_both, quantize_operand
from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.quantizer import Values, quantize_values
from nvfp4_train.precision.runtime import PrecisionRuntime
from nvfp4_train.precision.te_linear import TeLinears
from nvfp4_train.precision.te_recipes import TeRecipe
from nvfp4_train.precision.three_gemms import ThreeGemms

_SIZE = 128  # tokens, in-features and out-features: the smallest that fits every format
# Relative error (RMS) of one quantized Gaussian operand, with a factor of two to spare.
_OPERAND_ERROR = {"e2m1": 0.25, "e4m3": 0.06, "e5m2": 0.12, "bf16": 0.01}
# Rows and columns of what kernels are tried on: several programs of each, and a ragged last one.
_ROWS, _COLUMNS = 256, 1152
_KEY = 1 << 40
_SAME = 2.0**-7  # relative difference of two devices: the order of the sums, and one rounding to BF16


class Products(NamedTuple):
    """What the three GEMMs of one linear gave."""

    fprop: Tensor
    dgrad: Tensor
    wgrad: Tensor


def self_test(
    assignments: Iterable[LinearPrecision], device: torch.device | str, native: bool = False, gemm: str = "exact"
) -> int:
    """Try the GEMMs of a run on its device.

    Args:
        assignments: of the linears that will run.
        device: where.
        native: FP8 GEMMs run on its FP8 tensor cores; the reference emulates them.
        gemm: how the others are emulated.

    Returns:
        How many distinct sets of operands were tried.

    Raises:
        PrecisionError: names the device, the GEMM and the error.
    """
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    distinct = {(a.fprop, a.dgrad, a.wgrad): a for a in assignments}
    x, w, dy, exact = _small_problem()
    for assignment in distinct.values():
        small = replace(assignment, in_features=_SIZE, out_features=_SIZE)
        reference = _run(small, x, w, dy, gemm=gemm)
        for product in Products._fields:
            _compare(product, small, reference, exact, _allowed(product, small), "CPU", "plain float64")
        if device.type != "cpu":
            _compare_kernels(assignment, device, name, native)
            found = _run(small, x.to(device), w.to(device), dy.to(device), native, gemm)
            for product in Products._fields:
                _compare(product, small, found, reference, _SAME, name, "the reference on the CPU")
    return len(distinct)


def self_test_transformer_engine(
    assignments: Iterable[LinearPrecision],
    recipes: Mapping[str, TeRecipe],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> int:
    """The same for linears that Transformer Engine runs, against plain products: its random bits are its own.

    Args:
        recipes: name -> recipe of every linear that it runs.
        group: as `TeLinears` has it: what has run once takes part in every later reduction of amaxes.

    Returns:
        How many distinct recipes were tried.
    """
    distinct = {recipes[a.name]: a for a in assignments if a.name in recipes}
    x, w, dy, exact = _small_problem()
    for assignment in distinct.values():
        small = replace(assignment, in_features=_SIZE, out_features=_SIZE)
        there = x.to(device), w.to(device), dy.to(device)
        found = _run_transformer_engine(small, recipes[small.name], *there, group)
        for product in Products._fields:
            allowed = _allowed(product, small)
            _compare(product, small, found, exact, allowed, "Transformer Engine", "plain float64")
    return len(distinct)


def _run_transformer_engine(
    precision: LinearPrecision, recipe: TeRecipe, x: Tensor, w: Tensor, dy: Tensor, group: dist.ProcessGroup | None
) -> Products:
    layer = torch.nn.Linear(_SIZE, _SIZE, bias=False, device=x.device)
    gradient = torch.zeros_like(w)
    layer.weight = torch.nn.Parameter(w)
    layer.weight.main_grad = gradient  # type: ignore[attr-defined]
    runtime = PrecisionRuntime(seed=0, fuse_wgrad=True)
    runtime.expect([precision.name])
    linear = TeLinears({precision.name: recipe}, runtime, group).make(precision, layer)
    assert linear is not None
    runtime.begin_step(1, Passes())
    runtime.begin_microbatch(0)
    leaf = x.clone().requires_grad_()
    y = linear(leaf, runtime.call())
    y.backward(dy)
    runtime.end_step()
    assert leaf.grad is not None
    return Products(y.detach(), leaf.grad, gradient)


def _small_problem() -> tuple[Tensor, Tensor, Tensor, Products]:
    """x and dy in BF16, w in FP32, and the three products in float64."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(_SIZE, _SIZE, generator=generator) for _ in range(3))
    x, dy = x.bfloat16(), dy.bfloat16()
    exact = Products(x.double() @ w.double().t(), dy.double() @ w.double(), dy.double().t() @ x.double())
    return x, w, dy, exact


def _compare_kernels(precision: LinearPrecision, device: torch.device, name: str, native: bool = False) -> None:
    """Every operand of a linear that kernels make, by itself and along with its other layout, against the reference.

    Of a native run those that FP8 tensor cores read are left to its products.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_ROWS, _COLUMNS, generator=generator) * torch.randn(_ROWS, 1, generator=generator).exp()
    x[17, 33], x[64:80] = 1e4, 0.0  # an outlier, blocks of zeros, and blocks too small for a scale
    x[96:128] *= 1e-7
    for (gemm, kind), axis in AXES.items():
        spec, source = precision.operands[gemm][kind], x if kind == "weight" else x.bfloat16()
        on_device, decode = source.to(device), None
        if spec.source == "decoded":  # x as what the forward pass multiplied, apart from its tensor scale
            on_device, decode = x.bfloat16().to(device), torch.tensor(0.37, device=device)
            source = x.bfloat16().float() * 0.37
        if not has_kernel(on_device, spec, axis) or (native and spec.format in FP8_FORMATS):
            continue
        amax = torch.tensor(3.0) if spec.format == "fp8_delayed" else None
        found = quantize_operand(
            on_device, spec, key=_KEY, axis=axis, amax=amax if amax is None else amax.to(device), sign_key=_KEY + 2,
            block_scales=False, decode=decode,
        )  # fmt: skip
        expected = quantize_values(source, spec, key=_KEY, axis=axis, amax=amax, sign_key=_KEY + 2)
        _same_bits(found, expected, f"{gemm} {kind}", spec, name)
        if kind == "weight" or axis == 0:
            continue
        columns = precision.operands["wgrad"][kind]
        if made_together(on_device, spec, columns):
            first, second = quantize_both(on_device, spec, columns, _KEY, _KEY + 1)
            _same_bits(first, expected, f"{gemm} {kind}", spec, name)
            expected = quantize_values(source, columns, key=_KEY + 1, axis=0)
            _same_bits(second, expected, f"wgrad {kind}", columns, name)


def _same_bits(found: Values, expected: Values, operand: str, spec: QuantSpec, device: str) -> None:
    values, scale = found.values.cpu(), expected.scale
    different = int((values != expected.values.to(values.dtype)).sum())
    scaled = found.scale is None if scale is None else found.scale is not None and torch.equal(found.scale.cpu(), scale)
    if different or not scaled:
        raise PrecisionError(
            f"The start-up test failed on {device}: the kernel that quantizes {operand} to {spec.format} differs "
            f"from the reference in {different} of {values.numel()} numbers{'' if scaled else ' and in its scale'}. "
            "Training would go wrong silently. Choose another precision or device, and report this device and its "
            "driver."
        )


def _run(
    precision: LinearPrecision, x: Tensor, w: Tensor, dy: Tensor, native: bool = False, gemm: str = "exact"
) -> Products:
    """One forward and backward pass outside of any module."""
    runtime = PrecisionRuntime(seed=0, native=native, gemm=gemm)
    gemms = ThreeGemms(precision, runtime)
    runtime.histories = AmaxHistories(gemms.delayed_tensors(), 1, x.device)
    runtime.expect([precision.name])
    runtime.begin_step(1, Passes())
    runtime.begin_microbatch(0)
    call = runtime.call()
    y, kept = gemms.forward(x, w, None, call)
    along_out, along_tokens = gemms.gradients(dy, call, True, True)
    assert along_out is not None
    assert along_tokens is not None
    dx = gemms.input_gradient(along_out, w, call)
    return Products(y, dx, gemms.weight_gradient(along_tokens, kept, call, None))


def _allowed(gemm: str, precision: LinearPrecision) -> float:
    """Relative error that the roundings of both operands explain; a decoded one was rounded in the forward pass too."""
    forward = precision.operands["fprop"]
    roundings = []
    for kind, operand in precision.operands[gemm].items():
        roundings.append(operand)
        if operand.source == "decoded":
            roundings.append(forward[kind])
    return sum(_OPERAND_ERROR[element_of(operand)] ** 2 for operand in roundings) ** 0.5


def _compare(
    gemm: str,
    precision: LinearPrecision,
    found: Products,
    expected: Products,
    allowed: float,
    device: str,
    against: str,
) -> None:
    wanted = getattr(expected, gemm).double().cpu()
    error = float((getattr(found, gemm).double().cpu() - wanted).norm() / wanted.norm())
    if not error <= allowed:
        raise PrecisionError(
            f"The start-up test failed on {device}: {gemm} in {precision.gemm_formats[gemm]} (as in {precision.name}) "
            f"is off by {error:.3g} of its size against {against}, where {allowed:.3g} is allowed. Training would go "
            "wrong silently. Write precision.backend=emulated, or choose another precision or device; and report this "
            "device and its driver."
        )
