"""FP8 on a GPU as emulation wants it: values in the layout of x. The codes that FP8 tensor cores read are elsewhere.

With a scale of the whole tensor, elements are exact in BF16 and serve both contractions. Blocks of 128 have FP32
scales, and their values are FP32. A program owns a tile of 128 x 128: one block of weights, or 128 blocks of 1 x 128 in
either direction.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    EXPONENT,
    INTERPRETED,
    bounded_nearest,
    load_amax,
    magnitude_bits,
    scaled_magnitude,
    signed_bfloat16,
    to_float32,
    with_sign,
)
from nvfp4_train.precision.kernels.fp8 import TILE, fp8_scales
from nvfp4_train.precision.kernels.rows import largest_of

# Warps of `block_values_kernel`; each holds as many rows at a time.
WARPS = tl.constexpr(4)


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
def block_values(x, encode, decode):
    """FP32 values of E4M3 elements of x (FP32) with these block scales, which PTX converts to and back in pairs."""
    if INTERPRETED:
        return with_sign(bounded_nearest(tl.abs(x) * encode, 3) * decode, x)
    else:
        elements = tl.inline_asm_elementwise(
            """{
            .reg .b16 codes, first, second;
            .reg .b32 pair;
            cvt.rn.satfinite.e4m3x2.f32 codes, $3, $2;
            cvt.rn.f16x2.e4m3x2 pair, codes;
            mov.b32 {first, second}, pair;
            cvt.f32.f16 $0, first;
            cvt.f32.f16 $1, second;
            }""",
            "=f,=f,f,f",
            [x * encode],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
        return elements * decode


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
    """Values in blocks of 1 x 128 along the columns, in blocks along the rows, or both, from one read.

    A warp has every fourth row; a thread four neighbouring columns of them. So a block along the columns is one warp's,
    and of a block along the rows each thread has a quarter.
    """
    first = tl.program_id(0).to(tl.int64) * TILE
    m = tl.arange(0, WARPS)[:, None]
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    base = first * columns
    tile = ()
    for i in tl.static_range(0, TILE, WARPS):
        mask = (first + i + m < rows) & (n < columns)
        tile = tile + (tl.load(x + base + ((i + m) * columns + n), mask=mask, other=0.0),)
    if COLUMN:
        largest = tl.max(magnitude_bits(largest_of(tile, TILE // WARPS)), 0)[None, :]
        encode, decode = fp8_scales(largest, 448.0, COLUMN_POWER_OF_TWO)
    for i in tl.static_range(0, TILE, WARPS):
        mask = (first + i + m < rows) & (n < columns)
        offset = (i + m) * columns + n
        part = to_float32(tile[i // WARPS])
        if COLUMN:
            tl.store(column_out + base + offset, block_values(part, encode, decode), mask=mask)
        if ROW:
            largest_in_row = tl.max(magnitude_bits(part), 1)[:, None]
            row_encode, row_decode = fp8_scales(largest_in_row, 448.0, ROW_POWER_OF_TWO)
            tl.store(row_out + base + offset, block_values(part, row_encode, row_decode), mask=mask)


@triton.jit
def square_block_values_kernel(x, out, rows, columns, POWER_OF_TWO: tl.constexpr):
    """Values in 128 x 128 tiles."""
    m = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    mask = (m < rows) & (n < columns)
    tile = to_float32(tl.load(x + m * columns + n, mask=mask, other=0.0))
    encode, decode = fp8_scales(tl.max(tl.max(magnitude_bits(tile), 1), 0), 448.0, POWER_OF_TWO)
    tl.store(out + m * columns + n, block_values(tile, encode, decode), mask=mask)
