"""FP8 on a GPU as emulation wants it: values in the layout of x. The codes that FP8 tensor cores read are elsewhere.

With a scale of the whole tensor, elements are exact in BF16 and serve both contractions. Blocks of 128 have FP32
scales, and their values are FP32. A program owns a tile of 128 x 128: one block of weights, or 128 blocks of 1 x 128 in
either direction.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    EXPONENT,
    bounded_nearest,
    load_amax,
    magnitude_bits,
    scaled_magnitude,
    signed_bfloat16,
    to_float32,
    with_sign,
)
from nvfp4_train.precision.kernels.fp8 import TILE, fp8_scales

# Rows, or columns, of a tile that a program holds at once.
STRIP = tl.constexpr(32)


@triton.jit
def tensor_values_kernel(
    x, amax, given, out, scales, count, GIVEN: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr
):
    """Elements of a contiguous tensor with one scale, that of its own amax (in slots) or of the amax `given`.

    `scales` takes the decode scale and the tensor's own amax.
    """
    amax_bits = load_amax(amax)
    follow = amax_bits
    if GIVEN:
        follow = tl.where(amax_bits < EXPONENT, tl.load(given).to(tl.int32, bitcast=True), amax_bits)
    encode, decode = fp8_scales(follow, 57344.0 if MANTISSA == 2 else 448.0, False)
    if tl.program_id(0) == 0:
        tl.store(scales, decode)
        tl.store(scales + 1, amax_bits.to(tl.float32, bitcast=True))
    i = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    tile = tl.load(x + i, mask=mask, other=0.0)
    elements = bounded_nearest(scaled_magnitude(tile, tl.full((BLOCK,), encode, tl.float32)), MANTISSA)
    tl.store(out + i, signed_bfloat16(elements, tile), mask=mask)


@triton.jit
def block_values(tile, encode, decode):
    """FP32 values of E4M3 elements with these block scales."""
    return with_sign(bounded_nearest(tl.abs(tile) * encode, 3) * decode, tile)


@triton.jit
def stored_strip(
    x, out, first_row, first_column, rows, columns, AXIS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Values of HEIGHT x WIDTH elements in blocks along AXIS, of which the strip holds whole ones."""
    m = first_row + tl.arange(0, HEIGHT)[:, None]
    n = first_column + tl.arange(0, WIDTH)[None, :]
    mask = (m < rows) & (n < columns)
    strip = to_float32(tl.load(x + m * columns + n, mask=mask, other=0.0))
    encode, decode = fp8_scales(tl.max(magnitude_bits(strip), AXIS), 448.0, POWER_OF_TWO)
    values = block_values(strip, tl.expand_dims(encode, AXIS), tl.expand_dims(decode, AXIS))
    tl.store(out + m * columns + n, values, mask=mask)


@triton.jit
def block_values_kernel(
    x,
    row_out,
    column_out,
    rows,
    columns,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    ROW_POWER_OF_TWO: tl.constexpr,
    COLUMN_POWER_OF_TWO: tl.constexpr,
):
    """Values in blocks of 1 x 128 along the columns, in blocks along the rows, or both: a strip of a tile at a time, so
    that a thread holds few of them; the second read finds them in a cache.
    """
    m = tl.program_id(0).to(tl.int64) * TILE
    n = tl.program_id(1) * TILE
    if COLUMN:
        for start in range(0, TILE, STRIP):
            stored_strip(x, column_out, m, n + start, rows, columns, 0, COLUMN_POWER_OF_TWO, TILE, STRIP)
    if ROW:
        for start in range(0, TILE, STRIP):
            stored_strip(x, row_out, m + start, n, rows, columns, 1, ROW_POWER_OF_TWO, STRIP, TILE)


@triton.jit
def square_block_values_kernel(x, out, rows, columns, POWER_OF_TWO: tl.constexpr):
    """Values in 128 x 128 tiles."""
    m = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    mask = (m < rows) & (n < columns)
    tile = to_float32(tl.load(x + m * columns + n, mask=mask, other=0.0))
    encode, decode = fp8_scales(tl.max(tl.max(magnitude_bits(tile), 1), 0), 448.0, POWER_OF_TWO)
    tl.store(out + m * columns + n, block_values(tile, encode, decode), mask=mask)
