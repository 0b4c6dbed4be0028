"""Quantize a matrix: the one entrance to all formats.

`quantize` gives what a file or a tensor core would hold: codes, block scales, amax. `quantize_values` gives what an
emulated GEMM eats: `element * block scale` as ordinary numbers, with the tensor scale apart. Both are the same
arithmetic, in three steps that every format shares:

    load    convert to float32, rotate where the spec says so, find the largest magnitude of every block
    scale   a format's module turns those magnitudes into scales
    round   multiply every block by its scale and round to the element type's nearest (or a random) neighbour

`quantize_values` works on cache-sized chunks and in place: on a CPU it is what a low-precision training step waits for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nvfp4_train.precision import eden, four_over_six, fp8, mx, nvfp4
from nvfp4_train.precision.blocks import Blocks, Loaded, Scaled
from nvfp4_train.precision.config import PrecisionError, QuantSpec
from nvfp4_train.precision.e2m1 import decode_codes, encode_codes
from nvfp4_train.precision.formats import FORMATS, element_of
from nvfp4_train.precision.rotation import rotate_, signs_of
from nvfp4_train.precision.rounding import Key, random_bytes, round_nearest_, round_stochastic_
from nvfp4_train.precision.shards import WHOLE, Shard, take_largest


@dataclass(frozen=True)
class Values:
    """A quantized operand as numbers: `values * scale`.

    Attributes:
        values: elements times block scales, in the layout of x. float32 on a CPU, bfloat16 elsewhere, both exact (but
            for mxfp8 below 2^-126, where bfloat16 runs out of bits); fp8_block, whose block scales are FP32, is float32
            everywhere. The sign of a zero is not defined. A rotated operand has its contraction padded to a multiple of
            the rotation.
        scale: float32, 0-d, or one for each row of the operand (row scaling); None for 1.
        amax: float32 largest magnitude of this tensor (after rotation), 0-d, or one for each row (row scaling); of the
            whole tensor where x is a part of one and the scale follows it. None where a kernel had no need of it.
        block_scale: block scales as stored, in the operand's order; None where there are none.
        axis: dimension along which blocks lie; the rows of the operand lie along the other.
    """

    values: Tensor
    scale: Tensor | None
    amax: Tensor | None
    block_scale: Tensor | None = None
    axis: int = 1

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decoded numbers in the layout of x: `values * scale` in float32, then one cast to `dtype`."""
        wide = self.values.float()
        if self.scale is not None:
            wide = wide * (self.scale if self.scale.dim() == 0 else self.scale.unsqueeze(self.axis))
        return wide.to(dtype)


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix as it would be stored.

    Attributes:
        codes: 4-bit: uint8 [M, ceil(N/2)], the even element in the low nibble, a missing last one 0. 8-bit: float8
            [M, N]. bf16: bfloat16 [M, N]. N is the padded width for a rotated matrix.
        scales: block scales: float8_e4m3fn, E8M0 bytes (uint8) or float32, [M, ceil(N/b)], or [ceil(M/b), ceil(N/b)]
            for square tiles; None for formats without.
        amax: float32 0-d, or [M] row-scaled: of what was quantized, after rotation.
        tensor_scale: float32 0-d, or [M] row-scaled: decode scale of the tensor; None for 1.
        spec: how it was quantized.
        columns: N.
    """

    codes: Tensor
    scales: Tensor | None
    amax: Tensor
    tensor_scale: Tensor | None
    spec: QuantSpec
    columns: int

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decoded matrix [M, N]: `element * block scale * tensor scale` in float32, then one cast to `dtype`."""
        if self.spec.format == "bf16":
            return self.codes.to(dtype)
        four_bit = element_of(self.spec) == "e2m1"
        decoded = decode_codes(self.codes)[:, : self.columns] if four_bit else self.codes.float()
        if self.scales is not None:
            assert self.spec.tile is not None
            scales = mx.decode_e8m0(self.scales) if self.scales.dtype == torch.uint8 else self.scales.float()
            for dim, size in enumerate(self.spec.tile):
                scales = scales.repeat_interleave(size, dim)
            decoded = decoded * scales[: decoded.shape[0], : decoded.shape[1]]
        if self.tensor_scale is not None:
            decoded = decoded * (self.tensor_scale if self.tensor_scale.dim() == 0 else self.tensor_scale[:, None])
        return decoded.to(dtype)


@torch.no_grad()
def quantize(x: Tensor, spec: QuantSpec, seed: int = 0, *, amax: Tensor | None = None) -> Quantized:
    """Quantize x [M, N], blocks along N.

    Args:
        x: float32 or bfloat16, any strides.
        spec: how.
        seed: 64-bit key of the random bits of stochastic rounding and fresh signs.
        amax: what the tensor scale follows in place of the tensor's own; fp8_delayed without it has scale 1.

    Returns:
        The matrix [M, N]; rotated, its N is that of x filled up with zeros to a multiple of the rotation, and decoding
        gives all of it. A rotation spreads the last values of a row over its whole group, so that without the columns
        beyond x they could not be had back. An empty x has empty codes and scales, and amax 0.

    Raises:
        PrecisionError: x is no float32 or bfloat16 matrix.
    """
    _check(x, 1)
    if spec.format == "bf16":
        codes = x.contiguous().bfloat16()
        return Quantized(codes, None, _amax_of(codes), None, spec, x.shape[1])
    operand = _Operand(x.contiguous(), spec, seed, 1, amax, None, WHOLE)
    rows, columns = operand.shape
    negative = torch.empty_like(operand.loaded.out, dtype=torch.bool)
    for part, compact, scratch in operand.loaded.chunks():
        negative[part] = operand.encode(part, compact) < 0
        operand.round(part, scratch)
    rounded = operand.loaded.out[:rows, :columns]
    if element_of(spec) == "e2m1":
        codes = encode_codes(rounded, negative[:rows, :columns])
    else:
        codes = rounded.to(fp8.DTYPES[element_of(spec)])
    return Quantized(codes, operand.scaled.stored, operand.amax, operand.scaled.tensor, spec, columns)


@torch.no_grad()
def quantize_values(
    x: Tensor,
    spec: QuantSpec,
    *,
    key: Key = 0,
    axis: int = 1,
    amax: Tensor | None = None,
    sign_key: Key | None = None,
    shard: Shard = WHOLE,
) -> Values:
    """Quantize x [M, N] to values for a GEMM.

    Args:
        x: float32 or bfloat16, any strides.
        spec: how.
        key: 64-bit key of stochastic rounding's random bits, from `rounding.element_key`.
        axis: dimension of x that the GEMM contracts, along which blocks lie. 0 means that the operand is x^T: the
            result is that of `x.t()`, transposed back to the layout of x.
        amax: what the tensor scale follows in place of the tensor's own; fp8_delayed without it has scale 1.
        sign_key: 64-bit key of fresh signs, shared by both operands of a GEMM; None means `key`.
        shard: which part of a matrix x is. The tensor scale then follows the amax of the whole, and elements have the
            random bits that they have in the whole. Every rank that shares the matrix must call.

    Returns:
        Values in the layout of x, padded along `axis` where x is rotated; empty ones, with amax 0, of an empty x.

    Raises:
        PrecisionError: x is no float32 or bfloat16 matrix.
    """
    _check(x, axis)
    if not x.is_contiguous() and x.t().is_contiguous():
        turned = Shard(shard.columns, shard.rows)
        other = quantize_values(x.t(), spec, key=key, axis=1 - axis, amax=amax, sign_key=sign_key, shard=turned)
        return replace(other, values=other.values.t(), axis=axis)
    x = x.contiguous()
    on_cpu = x.device.type == "cpu"
    if spec.format == "bf16":
        values = x.bfloat16()
        return Values(values.float() if on_cpu else values, None, _amax_of(values), None, axis)
    operand = _Operand(x, spec, key, axis, amax, sign_key, shard)
    values, scaled = operand.values(), operand.scaled
    if not on_cpu and spec.format != "fp8_block":
        values = values.bfloat16()
    block_scale = None if scaled.stored is None else operand.loaded.blocks.operand(scaled.stored)
    return Values(values, scaled.tensor, operand.amax, block_scale, axis)


class _Operand:
    """A matrix with its scales, ready to be rounded chunk by chunk."""

    def __init__(
        self, x: Tensor, spec: QuantSpec, key: Key, axis: int, amax: Tensor | None, sign_key: Key | None, shard: Shard
    ) -> None:
        self.spec = spec
        self.shard = shard
        self.element = element_of(spec)
        self.loaded, self.shape = load(x, spec, axis, key if sign_key is None else sign_key)
        self.amax = self.loaded.amax
        self.scaled = self._scale(amax, key)
        blocks = self.loaded.blocks
        self.bytes: Tensor | None = None
        if spec.rounding == "stochastic":
            extents = shard.extents(self.shape)
            rows, columns = extents if axis == 1 else extents[::-1]
            self.bytes = random_bytes(key, rows, columns, axis=axis, device=x.device)
            if self.bytes.shape != self.loaded.out.shape:
                missing = (blocks.rows - self.bytes.shape[0], blocks.columns - self.bytes.shape[1])
                self.bytes = torch.nn.functional.pad(self.bytes, (0, missing[1], 0, missing[0]))

    def _scale(self, amax: Tensor | None, key: Key) -> Scaled:
        spec, loaded = self.spec, self.loaded
        if spec.format in ("mxfp4", "mxfp8"):
            return mx.scale_blocks(loaded, self.element, spec.scale_rounding)
        if spec.format == "fp8_block":
            return fp8.scale_blocks(loaded, spec.power_of_two)
        if spec.format == "fp8_delayed" and amax is None:
            amax = torch.zeros_like(loaded.amax)
        if amax is None and spec.scaling == "tensor":
            take_largest(loaded.amax, self.shard)
        follow = loaded.amax if amax is None else torch.where(torch.isfinite(loaded.amax), amax, loaded.amax)
        if spec.format != "nvfp4":
            return fp8.scale_tensor(loaded, follow, self.element)
        if spec.correction == "eden":
            return eden.scale(loaded, follow, key, self.shard.extents(self.shape))
        if spec.scaling == "row":
            own = _largest_along(loaded.block_amax, loaded.blocks.axis)
            take_largest(own, [self.shard[loaded.blocks.axis]])
            self.amax = own.flatten()
            follow = own if amax is None else torch.where(torch.isfinite(own), amax.view(own.shape), own)
        if spec.four_over_six:
            return four_over_six.scale(loaded, follow, spec.four_over_six)
        return nvfp4.scale(loaded, follow)

    def encode(self, rows: slice, compact: slice) -> Tensor:
        """Scale some rows into `loaded.out`; returns them."""
        return self.loaded.encode(rows, self.scaled.encode[compact], self.loaded.out[rows], self.scaled.divide)

    def round(self, rows: slice, scratch: Tensor) -> Tensor:
        """Round some scaled rows of `loaded.out` to elements, in place; returns them."""
        part = self.loaded.out[rows]
        if self.bytes is None:
            return round_nearest_(part, scratch[0], self.element)
        return round_stochastic_(part, scratch, self.element, self.bytes[rows])

    def values(self) -> Tensor:
        """All elements times the scales of their blocks, without the padding that was for blocks alone."""
        loaded, decode = self.loaded, self.scaled.decode
        for rows, compact, scratch in loaded.chunks():
            self.encode(rows, compact)
            part = self.round(rows, scratch)
            if decode is not None:
                loaded.blocks.view(part).mul_(loaded.blocks.spread(decode[compact]))
        values = loaded.out
        if self.shape != values.shape:
            values = values[: self.shape[0], : self.shape[1]]
        return values


def load(x: Tensor, spec: QuantSpec, axis: int, sign_key: Key) -> tuple[Loaded, tuple[int, int]]:
    """Convert, pad and rotate contiguous x [M, N], and find the largest magnitudes.

    Returns:
        The padded matrix, and the size [M, N] to cut results back to (with the padded contraction of a rotated matrix).
    """
    block = FORMATS[spec.format].block
    square = spec.tile is not None and spec.tile[0] > 1
    together = [1, 1]
    if block is not None:
        together[axis] = max(block, spec.rotation or 1)
        if square:
            together = [block, block]
    missing = [-size % multiple for size, multiple in zip(x.shape, together, strict=True)]
    shape = [x.shape[0], x.shape[1]]
    if any(missing):
        x = torch.nn.functional.pad(x, (0, missing[1], 0, missing[0]))
        if spec.rotation:
            shape[axis] += missing[axis]
    rows, columns = x.shape
    # A whole-tensor format needs no blocks: a row is as good as any.
    blocks = Blocks(rows, columns, block or max(1, columns), axis if block else 1, square)
    out = torch.empty(rows, columns, dtype=torch.float32, device=x.device)
    copied = x.dtype != torch.float32 or spec.rotation is not None
    source = out if copied else x
    signs = signs_of(spec, sign_key, x.device) if spec.rotation else None
    block_amax = torch.empty(blocks.scale_shape, dtype=torch.float32, device=x.device)
    buffers = 3 if spec.rounding == "stochastic" or spec.four_over_six or spec.correction else 1
    scratch = out.new_empty(buffers, min(rows, blocks.chunk_rows(x.device, spec.rotation or 1)), columns)
    amax = out.new_zeros(())
    loaded = Loaded(source, out, block_amax, amax, blocks, scratch)
    for part, compact, (free, *_) in loaded.chunks():
        if copied:
            out[part] = x[part]
        if signs is not None:
            rotated = rotate_(out[part], free, signs, axis)
            out[part] = rotated if x.dtype == torch.float32 else rotated.to(x.dtype)
        block_amax[compact] = blocks.largest(torch.abs(source[part], out=free))
    if block_amax.numel():
        torch.amax(block_amax, dim=(0, 1), out=amax)
    return loaded, (shape[0], shape[1])


def _largest_along(magnitudes: Tensor, dim: int) -> Tensor:
    """Largest along a dimension that stays with size 1; 0 where there are none."""
    if magnitudes.shape[dim]:
        return magnitudes.amax(dim, keepdim=True)
    return magnitudes.sum(dim, keepdim=True)


def _amax_of(x: Tensor) -> Tensor:
    return x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)


def _check(x: Tensor, axis: int) -> None:
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16):
        raise PrecisionError(
            f"cannot quantize a {x.dtype} tensor of shape {list(x.shape)}: blocks lie in a matrix, and a wider type "
            "would be rounded twice. Give a float32 or bfloat16 tensor [M, N]; float16 becomes float32 exactly."
        )
    assert axis in (0, 1), axis
