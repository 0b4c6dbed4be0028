"""The three GEMMs of one linear layer, each in the format its precision says.

    fprop  Y  = X W^T      dgrad  dX = dY W      wgrad  dW = dY^T X

The weight parameter is FP32, X and dY are BF16 [tokens, features], Y and dX come out in BF16, dW in FP32. Every
operand is quantized from the high-precision tensor along the contraction of its own GEMM, unless its source says
`decoded`: then from the values the forward GEMM multiplied. Nothing is transposed in memory: an operand contracted
over its first dimension is quantized along it and keeps its layout.

Natively, where the tensor cores multiply FP8 themselves, the same operands are codes in place of values; what they are
made of and when is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_train.precision.assignment import LinearPrecision
from nvfp4_train.precision.config import Operand, QuantSpec
from nvfp4_train.precision.formats import FP8_FORMATS, layout_independent
from nvfp4_train.precision.gemm import fp8_gemm, gemm, written
from nvfp4_train.precision.keys import RandomOperand
from nvfp4_train.precision.operands import made_together, quantize_both, quantize_operand
from nvfp4_train.precision.quantizer import Values, quantize_values
from nvfp4_train.precision.rounding import Key, element_key
from nvfp4_train.precision.runtime import Call, PrecisionRuntime
from nvfp4_train.precision.shards import WHOLE, Axis, Shard
from nvfp4_train.precision.weights import WeightCache

BF16 = Operand(format="bf16")


class Factor(NamedTuple):
    """One of the two factors of a GEMM: `values * scale`.

    Attributes:
        values: as the GEMM takes them, in the layout of the tensor. Of a native operand float8 codes, rows along the
            contraction, with tokens filled up.
        scale: FP32, 0-d or one for each row of the operand; None for 1. Of codes: as `gemm` takes them.
        format: of the values; what is written down as having run.
    """

    values: Tensor
    scale: Tensor | None
    format: str

    def decoded(self) -> Tensor:
        """FP32 numbers; a row scale belongs to an operand contracted over its last dimension."""
        wide = self.values.float()
        if self.scale is None:
            return wide
        return wide * (self.scale[:, None] if self.scale.dim() == 1 else self.scale)

    def to_decode(self) -> tuple[Tensor, Tensor | None]:
        """The same numbers as FP32 x * scale, 0-d, for a kernel that multiplies as it reads; or decoded, and None."""
        if self.scale is None or self.scale.dim() == 1:
            return self.decoded(), None
        return self.values, self.scale


def is_random(spec: QuantSpec) -> bool:
    """Whether the values depend on the micro-batch's random bits."""
    return spec.rounding == "stochastic" or spec.signs == "fresh" or spec.correction is not None


def _is_fp8(operands: Iterable[Operand]) -> bool:
    return all(operand.format in FP8_FORMATS for operand in operands)


class ThreeGemms:
    """One linear's GEMMs, its quantized weights, and its part in the runtime's books.

    Args:
        precision: what the recipe decided for the linear.
        runtime: shared by all linears of the process.
        weight_shard: which part of the weight [out, in] this rank holds.
    """

    def __init__(self, precision: LinearPrecision, runtime: PrecisionRuntime, weight_shard: Shard = WHOLE) -> None:
        self.name = precision.name
        self.formats = precision.gemm_formats
        self.runtime = runtime
        self._operands = precision.operands
        self._weight_shard = weight_shard
        self._native = {gemm for gemm, pair in precision.operands.items() if runtime.native and _is_fp8(pair.values())}
        self._weights = WeightCache()

    def delayed_tensors(self) -> list[str]:
        """`<linear>.<input|weight|gradient>` of those that are scaled by an amax history."""
        kinds = {kind for pair in self._operands.values() for kind, o in pair.items() if o.format == "fp8_delayed"}
        return [f"{self.name}.{kind}" for kind in sorted(kinds)]

    def random_operands(self) -> list[RandomOperand]:
        """Those that have a key of their own in each micro-batch, and the fresh signs that two operands share."""
        pairs = [(gemm, kind, spec) for gemm, pair in self._operands.items() for kind, spec in pair.items()]
        names = [f"{gemm}.{kind}" for gemm, kind, spec in pairs if is_random(spec)]
        signs = [f"{gemm}.signs" for gemm, _, spec in pairs if spec.signs == "fresh"]
        return [(self.name, operand) for operand in dict.fromkeys((*names, *signs))]

    # ---- the GEMMs

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, for_wgrad: bool = True
    ) -> tuple[Tensor, Factor]:
        """Y = X W^T + bias.

        Args:
            x: [tokens, in] BF16.
            weight: [out, in] FP32.
            bias: [out] or None, added to the FP32 accumulator.
            for_wgrad: whether wgrad's factor of X may be made along with fprop's, where one kernel makes both.

        Returns:
            Y [tokens, out] BF16, and what `weight_gradient` needs of X: its factor, or x itself in format bf16.
        """
        operand = self._operand("fprop", "input", call)
        both = self._both(x, ("fprop", "input"), ("wgrad", "input"), call) if for_wgrad else None
        inputs = self._quantize(x, "fprop", "input", 1, call) if both is None else both[0]
        weights = self._weight(weight, "fprop", 1, call)
        y = self._multiply("fprop", inputs, weights, call, bias=bias)[: len(x)]
        if both is not None:
            return y, both[1]
        backward = self._operand("wgrad", "input", call)
        shared = backward == operand and layout_independent(operand) and not self._native
        if inputs.format != "bf16" and (shared or backward.source == "decoded"):
            return y, inputs
        return y, Factor(x, None, "bf16")

    def gradients(self, dy: Tensor, call: Call, dgrad: bool, wgrad: bool) -> tuple[Factor | None, Factor | None]:
        """dY [tokens, out] BF16 as the factor of those GEMMs that are wanted: along out-features, and along tokens."""
        both = self._both(dy, ("dgrad", "gradient"), ("wgrad", "gradient"), call) if dgrad and wgrad else None
        if both is not None:
            return both
        along_out = self._quantize(dy, "dgrad", "gradient", 1, call) if dgrad else None
        if not wgrad:
            return along_out, None
        operand = self._operand("wgrad", "gradient", call)
        same = operand == self._operand("dgrad", "gradient", call) and layout_independent(operand)
        if along_out and same and not self._native:
            return along_out, along_out
        return along_out, self._quantize(dy, "wgrad", "gradient", 0, call)

    def input_gradient(self, gradient: Factor, weight: Tensor, call: Call, tokens: int | None = None) -> Tensor:
        """dX = dY W, [tokens, in] BF16; `tokens` where the gradient may have been filled up."""
        return self._multiply("dgrad", gradient, self._weight(weight, "dgrad", 0, call), call)[:tokens]

    def weight_gradient(
        self, gradient: Factor, kept: Factor, call: Call, add_to: Tensor | None, start: bool = False
    ) -> Tensor:
        """dW = dY^T X, [out, in] FP32; added to the buffer `add_to` in place where one is given, or at the `start` of a
        sum written over what it held.
        """
        inputs = self._kept(kept, call)
        if not call.sampled:
            return self._multiply("wgrad", gradient, inputs, call, dtype=torch.float32, add_to=add_to, start=start)
        dw = self._multiply("wgrad", gradient, inputs, call, dtype=torch.float32)
        self.runtime.health.weight_gradient(self.name, dw)
        return dw if add_to is None else written(dw, add_to, start)

    def _multiply(self, gemm_name: str, first: Factor, second: Factor, call: Call, **options: Any) -> Tensor:
        """The product of two factors, see `gemm`, and what it was made of in the books."""
        codes = gemm_name in self._native and first.values.itemsize == second.values.itemsize == 1
        if self.runtime.observing:
            ran = " x ".join(dict.fromkeys((first.format, second.format)))
            emulated = self.runtime.native and not codes and {first.format, second.format} & set(FP8_FORMATS)
            self.runtime.record(self.name, gemm_name, f"{ran}, emulated" if emulated else ran, call)
        if codes:
            assert first.scale is not None
            assert second.scale is not None
            return fp8_gemm(first.values, second.values, scale_a=first.scale, scale_b=second.scale, **options)
        a = first.values.t() if gemm_name == "wgrad" else first.values
        b = second.values.t() if gemm_name == "fprop" else second.values
        return gemm(a, b, scale_a=first.scale, scale_b=second.scale, **options)

    # ---- their operands

    def _operand(self, gemm_name: str, kind: str, call: Call) -> Operand:
        """What is in force for an operand."""
        in_force = call.passes.forward if gemm_name == "fprop" else call.passes.backward
        return self._operands[gemm_name][kind] if in_force == "recipe" else BF16

    def _shard(self, kind: str, rows: int) -> Shard:
        """Which part this rank holds of an operand whose local part has so many rows."""
        if kind == "weight":
            return self._weight_shard
        features: Axis | None = self._weight_shard.columns if kind == "input" else self._weight_shard.rows
        return Shard(self.runtime.token_axis(rows), features)

    def _quantize(self, source: Tensor | Factor, gemm_name: str, kind: str, axis: int, call: Call) -> Factor:
        """A tensor, or what a factor decodes to, as the factor of a GEMM that contracts it over `axis`."""
        operand = self._operand(gemm_name, kind, call)
        decode = None
        if isinstance(source, Tensor):
            x = source
        elif call.sampled or operand.format == "bf16":
            x = source.decoded()
        else:
            x, decode = source.to_decode()
        if operand.format == "bf16":
            rounded = x.bfloat16()
            return Factor(rounded.float() if x.is_cpu else rounded, None, "bf16")
        if call.evaluating and operand.rounding == "stochastic":
            operand = replace(operand, rounding="nearest")
        key = self._key(f"{gemm_name}.{kind}", call) if is_random(operand) else 0
        sign_key = self._key(f"{gemm_name}.signs", call) if operand.signs == "fresh" else 0
        name = f"{self.name}.{kind}"
        native, shard = gemm_name in self._native, self._shard(kind, len(x))
        amax, entry = self._delayed(operand, name, call)
        values = quantize_operand(
            x,
            operand,
            key=key,
            axis=axis,
            amax=amax,
            sign_key=sign_key,
            block_scales=call.sampled,
            shard=shard,
            native=native,
            seen=entry,
            decode=decode,
        )
        if amax is not None and not native:
            assert values.amax is not None
            self.runtime.record_amax(name, values.amax, call)
        if call.sampled:
            seen = quantize_values(x, operand, axis=axis, amax=amax, shard=shard) if native else values
            self.runtime.health.operand(self.name, f"{gemm_name}_{kind}", x, operand, seen, axis, sign_key)
        return self._factor(values, operand.format, native)

    def _factor(self, made: Values, format: str, native: bool = False) -> Factor:
        """A quantized operand as its GEMM multiplies it."""
        if self.runtime.gemm == "exact" or native:
            return Factor(made.values, made.scale, format)
        rounded = made.dequantize(torch.bfloat16)
        return Factor(rounded.float() if rounded.is_cpu else rounded, None, format)

    def _both(
        self, x: Tensor, rows: tuple[str, str], columns: tuple[str, str], call: Call
    ) -> tuple[Factor, Factor] | None:
        """x as the factor of two GEMMs (GEMM, operand), contracted over axis 1 and over axis 0, or None where no kernel
        makes both from one read. Health samples each operand by itself.
        """
        specs = self._operand(*rows, call), self._operand(*columns, call)
        shard = self._shard(rows[1], len(x))
        native = rows[0] in self._native and columns[0] in self._native
        decoded = any(spec.source == "decoded" for spec in specs)
        if call.sampled or call.evaluating or decoded or not made_together(x, *specs, shard, native):
            return None
        if native:
            return self._both_layouts(x, specs[0], rows[1], call)
        row_key, column_key = (
            self._key(".".join(names), call) if is_random(spec) else 0
            for names, spec in zip((rows, columns), specs, strict=True)
        )
        first, second = quantize_both(x, *specs, row_key, column_key, shard)
        return self._factor(first, specs[0].format), self._factor(second, specs[1].format)

    def _both_layouts(self, x: Tensor, spec: Operand, kind: str, call: Call) -> tuple[Factor, Factor]:
        """Codes of x, contracted over axis 1 and over axis 0, by the same spec."""
        amax, entry = self._delayed(spec, f"{self.name}.{kind}", call)
        shard = self._shard(kind, len(x))
        first, second = quantize_both(x, spec, spec, shard=shard, amax=amax, seen=entry, native=True)
        return Factor(first.values, first.scale, spec.format), Factor(second.values, second.scale, spec.format)

    def _delayed(self, spec: Operand, name: str, call: Call) -> tuple[Tensor | None, Tensor | None]:
        """What a delayed scale follows, and where a native operand's own amax goes; None and None of others."""
        if spec.format != "fp8_delayed":
            return None, None
        return self.runtime.delayed_amax(name), self.runtime.amax_entry(name, call)

    def _weight(self, weight: Tensor, gemm_name: str, axis: int, call: Call) -> Factor:
        """The weight as a factor, contracted over `axis`; once a step unless it depends on the micro-batch's bits."""
        operand = self._operand(gemm_name, "weight", call)
        native = gemm_name in self._native and operand.format in FP8_FORMATS
        if native and layout_independent(operand) and not call.sampled:
            return self._weight_layouts(weight, operand, call)[1 - axis]

        def make() -> Factor:
            source: Tensor | Factor = weight.detach()
            if operand.source == "decoded" and self._operand("fprop", "weight", call).format != "bf16":
                source = self._weight(weight, "fprop", 1, call)
            return self._quantize(source, gemm_name, "weight", axis, call)

        if is_random(operand) or not self.runtime.cache_weights:
            return make()
        key = (operand, 1 if layout_independent(operand) and not native else axis)
        return self._weights.get(weight, self.runtime.epoch, key, make)

    def _weight_layouts(self, weight: Tensor, operand: Operand, call: Call) -> tuple[Factor, Factor]:
        """The weight's codes for fprop and for dgrad."""

        def make() -> tuple[Factor, Factor]:
            return self._both_layouts(weight.detach(), operand, "weight", call)

        if not self.runtime.cache_weights:
            return make()
        return self._weights.get(weight, self.runtime.epoch, (operand, "both"), make)

    def _kept(self, kept: Factor, call: Call) -> Factor:
        """What the forward pass kept of X, as wgrad's factor."""
        if kept.format == "bf16":
            return self._quantize(kept.values, "wgrad", "input", 0, call)
        if self._operand("wgrad", "input", call).source == "decoded":
            return self._quantize(kept, "wgrad", "input", 0, call)
        return kept

    def _key(self, operand: str, call: Call) -> Key:
        assert call.step is not None, "evaluation draws no random bits"
        assert call.microbatch is not None
        if call.keys is not None:
            return call.keys[self.name, operand]
        return element_key(self.runtime.seed, call.step, call.microbatch, self.name, operand)
