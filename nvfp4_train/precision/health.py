"""How a low-precision run is doing: what quantization does to the tensors of one micro-batch.

    flushed       share of the non-zero values that became zero
    saturated     share of the values that are beyond the largest that their block's scale can hold and were cut to it
    sqnr_db       signal to quantization noise, 10 log10(sum x^2 / sum (q - x)^2); nearest NVFP4 of Gaussians: 20
    bias          mean(sign(x) (q - x)) / mean |x|: below 0 where magnitudes shrink, whatever the signs of x
    scale_spread  log2(largest / smallest non-zero block scale) of the blocks that hold anything but zeros
    amax          largest magnitude of what was quantized (the rotated copy where it is rotated)

and for each weight gradient `zeros`, its share of exact zeros, which rises over a run. Error and bias are reported
apart because passes need different things: a forward pass wants low error, a backward pass averages noise over many
tokens but adds up bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.formats import ELEMENT_MAX, element_of
from nvfp4_train.precision.mx import decode_e8m0
from nvfp4_train.precision.quantizer import Values
from nvfp4_train.precision.rotation import rotate
from nvfp4_train.precision.rounding import Key

STATISTICS = ("flushed", "saturated", "sqnr_db", "bias", "scale_spread", "amax")
_LARGEST_DB = 200.0  # of a tensor without any error


@dataclass
class HealthSample:
    """Statistics of one micro-batch; they stay on the device until `metrics` is asked for."""

    _operands: dict[str, Tensor] = field(default_factory=dict)
    _zeros: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def operand(
        self, linear: str, operand: str, x: Tensor, spec: QuantSpec, values: Values, axis: int, sign_key: Key = 0
    ) -> None:
        """Take down one operand.

        Args:
            linear: global name.
            operand: GEMM and kind, `dgrad_gradient`.
            x: [M, N], what was quantized.
            spec, axis, sign_key: how.
            values: the result.
        """
        self._operands[f"quant/{linear}/{operand}"] = statistics(x, spec, values, axis, sign_key)

    @torch.no_grad()
    def weight_gradient(self, linear: str, dw: Tensor) -> None:
        """Take down a weight gradient [out, in]."""
        self._zeros[f"quant/{linear}/weight_gradient/zeros"] = (dw == 0).float().mean()

    def metrics(self) -> dict[str, float]:
        """`quant/<linear>/<operand>/<statistic>`, worst and mean; empty without a sample. Forgets the sample."""
        found: dict[str, float] = {}
        if self._operands:
            rows = torch.stack(list(self._operands.values())).tolist()
            for name, row in zip(self._operands, rows, strict=True):
                found |= {f"{name}/{statistic}": value for statistic, value in zip(STATISTICS, row, strict=True)}
            found |= _summary(dict(zip(self._operands, rows, strict=True)))
        if self._zeros:
            zeros = dict(zip(self._zeros, torch.stack(list(self._zeros.values())).tolist(), strict=True))
            found |= zeros | {"quant/worst_gradient_zeros": max(zeros.values())}
        self._operands, self._zeros = {}, {}
        return found


def statistics(x: Tensor, spec: QuantSpec, values: Values, axis: int, sign_key: Key = 0) -> Tensor:
    """The six `STATISTICS` of one operand, FP32 [6] on its device; arguments as in `HealthSample.operand`."""
    assert values.amax is not None
    exact = rotate(x, spec, sign_key, axis).float()
    rounded = values.values.float()
    if axis == 0:  # as the operand lies: rows along the contraction
        exact, rounded = exact.t(), rounded.t()
    scale = torch.ones((), device=x.device) if values.scale is None else values.scale
    scale = scale[:, None] if scale.dim() == 1 else scale
    rounded = rounded * scale
    magnitude, noise = exact.abs(), rounded - exact

    limit = scale * ELEMENT_MAX[element_of(spec)]
    nonzero = exact != 0
    spread = torch.zeros((), device=x.device)
    if values.block_scale is not None:
        stored = values.block_scale
        blocks = decode_e8m0(stored) if stored.dtype == torch.uint8 else stored.float()
        assert spec.tile is not None
        spread = _spread(blocks, _any_of_blocks(nonzero, spec.tile))
        for dim, size in enumerate(spec.tile):
            blocks = blocks.repeat_interleave(size, dim)
        limit = limit * blocks[: exact.shape[0], : exact.shape[1]]
    flushed = (nonzero & (rounded == 0)).sum() / nonzero.sum().clamp(min=1)
    saturated = ((magnitude > limit * (1 + 1e-6)) & (rounded != 0)).float().mean()
    signal, error = exact.square().sum(), noise.square().sum()
    sqnr = torch.where(error == 0, _LARGEST_DB, 10 * (signal / error).log10()).clamp(max=_LARGEST_DB)
    bias = (noise * exact.sign()).sum() / magnitude.sum().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.stack([flushed, saturated, sqnr, bias, spread, values.amax.amax()])


def _any_of_blocks(mask: Tensor, tile: tuple[int, int]) -> Tensor:
    """Which blocks of a mask [M, N] hold a true value: [ceil(M / rows), ceil(N / columns)]."""
    for dim, size in enumerate(tile):
        missing = -mask.shape[dim] % size
        padding = (0, missing) if dim == 1 else (0, 0, 0, missing)
        mask = torch.nn.functional.pad(mask, padding).unflatten(dim, (-1, size)).any(dim + 1)
    return mask


def _spread(scales: Tensor, holding: Tensor) -> Tensor:
    """log2(largest / smallest) of the scales above 0 of those blocks, 0-d; 0 where there are none.

    A block of zeros has whatever scale its format gives it: 0, the smallest, or 1.
    """
    present = (scales > 0) & holding
    largest = torch.where(present, scales, 0.0).amax()
    smallest = torch.where(present, scales, math.inf).amin()
    return torch.where(present.any(), largest.log2() - smallest.log2(), 0.0)


def _summary(rows: dict[str, list[float]]) -> dict[str, float]:
    """Worst of each statistic over all operands, and mean error and bias of each pass's operands."""
    columns = dict(zip(STATISTICS, zip(*rows.values(), strict=True), strict=True))
    found = {
        "quant/worst_flushed": max(columns["flushed"]),
        "quant/worst_saturated": max(columns["saturated"]),
        "quant/worst_sqnr_db": min(columns["sqnr_db"]),
        "quant/worst_bias": max(columns["bias"], key=abs),
    }
    for name, of_pass in (("forward", True), ("backward", False)):
        chosen = [row for key, row in rows.items() if key.rpartition("/")[2].startswith("fprop_") == of_pass]
        if chosen:
            for statistic in ("sqnr_db", "bias"):
                index = STATISTICS.index(statistic)
                found[f"quant/{name}_{statistic}"] = sum(row[index] for row in chosen) / len(chosen)
    return found
