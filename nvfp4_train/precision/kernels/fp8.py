"""FP8 on a GPU: codes as FP8 tensor cores read them, as they lie and transposed, from one read.

An FP8 GEMM wants the contraction of both operands contiguous. A linear contracts its input over features and, for the
weight gradient, over tokens, so each tensor is written twice: its codes as they lie, and transposed. With blocks, a
program owns a tile of 128 x 128, which is a block of weights, and 128 blocks of 1 x 128 in either direction; the last
blocks of a matrix may be partial.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    EXPONENT,
    FLOAT_MAX,
    INTERPRETED,
    MAGNITUDE,
    SIGN,
    load_amax,
    magnitude_bits,
    to_float32,
)

TILE = tl.constexpr(128)
NAN = tl.constexpr(0x7FC00000)


@triton.jit
def fp8_scales(amax_bits, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(encode, decode) scales of FP8 from the bits of amaxes; decode is NaN where amax is not finite, to show."""
    encode = tl.minimum(tl.div_rn(LARGEST, amax_bits.to(tl.float32, bitcast=True)), FLOAT_MAX)
    encode = tl.where((amax_bits > 0) & (amax_bits < EXPONENT), encode, 1.0)
    if POWER_OF_TWO:
        encode = (encode.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    return encode, tl.where(amax_bits < EXPONENT, tl.div_rn(1.0, encode), float("nan"))


@triton.jit
def fp8_codes(y, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """Nearest FP8 number (ties to even) of y, at most the largest."""
    if INTERPRETED:
        bits = y.to(tl.int32, bitcast=True)
        magnitude = tl.minimum((bits & MAGNITUDE).to(tl.float32, bitcast=True), LARGEST)
        binade = (magnitude.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
        if LARGEST == 448.0:
            step = tl.maximum(binade * 0.125, 0.001953125)
        else:
            step = tl.maximum(binade * 0.25, 1.52587890625e-05)
        magic = step * 12582912.0
        rounded = (magnitude + magic) - magic
        y = (rounded.to(tl.int32, bitcast=True) | (bits & SIGN)).to(tl.float32, bitcast=True)
    return y.to(dtype)


@triton.jit
def load_tile(x, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's tile in FP32, zeros beyond the matrix; its rows and columns."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    return to_float32(tl.load(x + m[:, None] * columns + n[None, :], mask=mask, other=0.0)), m, n


@triton.jit
def store_rows(row_codes, codes, m, n, padded, columns):
    """Codes as they lie, to [padded, columns]."""
    tl.store(row_codes + m[:, None] * columns + n[None, :], codes, mask=(m < padded)[:, None] & (n < columns)[None, :])


@triton.jit
def store_columns(column_codes, codes, m, n, padded, columns):
    """Codes transposed, to [columns, padded]."""
    mask = (n < columns)[:, None] & (m < padded)[None, :]
    tl.store(column_codes + n[:, None].to(tl.int64) * padded + m[None, :], tl.trans(codes), mask=mask)


@triton.jit
def store_codes(
    row_codes, column_codes, y, m, n, padded, columns, ROW: tl.constexpr, COLUMN: tl.constexpr, LARGEST: tl.constexpr
):
    """Codes of y in the layouts that are wanted."""
    codes = fp8_codes(y, LARGEST, row_codes.dtype.element_ty)
    if ROW:
        store_rows(row_codes, codes, m, n, padded, columns)
    if COLUMN:
        store_columns(column_codes, codes, m, n, padded, columns)


@triton.jit
def enter_largest(target, bits):
    """The larger of what FP32 `target` holds and the magnitude with these bits; programs may enter at once."""
    target = target.to(tl.pointer_type(tl.int32), bitcast=True)
    if bits > tl.load(target, volatile=True):
        tl.atomic_max(target, bits, sem="relaxed")


@triton.jit
def tensor_codes_kernel(
    x, amax, row_codes, column_codes, scale, seen, rows, padded, columns,
    ROW: tl.constexpr, COLUMN: tl.constexpr, DELAYED: tl.constexpr, LARGEST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes of x with one scale: of `amax`'s slots, or (DELAYED) of the FP32 amax that it points to.

    `scale` takes the decode scale. A delayed one is known before x is, so each program adds what it sees: x's own amax
    to `seen`, and to `scale`, which must be 0 before, NaN where x is not finite.
    """
    tile, m, n = load_tile(x, rows, columns, ROWS, COLUMNS)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    if DELAYED:
        encode, decode = fp8_scales(tl.load(amax).to(tl.int32, bitcast=True), LARGEST, False)
        largest = tl.max(tl.max(magnitude_bits(tile), 1), 0)
        enter_largest(seen, largest)
        if largest >= EXPONENT:
            enter_largest(scale, NAN)
        elif first:
            enter_largest(scale, decode.to(tl.int32, bitcast=True))
    else:
        encode, decode = fp8_scales(load_amax(amax), LARGEST, False)
        if first:
            tl.store(scale, decode)
    store_codes(row_codes, column_codes, tile * encode, m, n, padded, columns, ROW, COLUMN, LARGEST)


@triton.jit
def store_scales(scales, block_amax, index, limit, POWER_OF_TWO: tl.constexpr):
    """Decode scales of a tile's blocks, to `scales` + `index` < `limit`; returns the encode scales.

    Encode scales are wanted by every thread that holds a part of a block. The others are divided once, by the thread
    that stores them: `gather` takes their amaxes there.
    """
    encode, _ = fp8_scales(block_amax, 448.0, POWER_OF_TWO)
    _, decode = fp8_scales(tl.gather(block_amax, tl.arange(0, TILE), 0), 448.0, POWER_OF_TWO)
    tl.store(scales + index, decode, mask=index < limit)
    return encode


@triton.jit
def row_blocks_kernel(
    x, row_codes, column_codes, row_scales, column_scales, rows, padded, columns,
    ROW: tl.constexpr, COLUMN: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """E4M3 codes in blocks of 1 x 128 along the columns, and of x^T along its own; scales [blocks, operand rows]."""
    tile, m, n = load_tile(x, rows, columns, TILE, TILE)
    bits = magnitude_bits(tile)
    if ROW:
        scales = row_scales + tl.program_id(1).to(tl.int64) * padded
        encode = store_scales(scales, tl.max(bits, 1), m, padded, POWER_OF_TWO)
        codes = fp8_codes(tile * encode[:, None], 448.0, row_codes.dtype.element_ty)
        store_rows(row_codes, codes, m, n, padded, columns)
    if COLUMN:
        scales = column_scales + tl.program_id(0).to(tl.int64) * columns
        encode = store_scales(scales, tl.max(bits, 0), n, columns, POWER_OF_TWO)
        codes = fp8_codes(tile * encode[None, :], 448.0, row_codes.dtype.element_ty)
        store_columns(column_codes, codes, m, n, padded, columns)


@triton.jit
def square_blocks_kernel(
    x, row_codes, column_codes, row_scales, column_scales, rows, columns, row_stride, column_stride,
    ROW: tl.constexpr, COLUMN: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """E4M3 codes in blocks of 128 x 128; scales [operand rows / 128, stride] of x and of its transpose."""
    tile, m, n = load_tile(x, rows, columns, TILE, TILE)
    encode, decode = fp8_scales(tl.max(tl.max(magnitude_bits(tile), 1), 0), 448.0, POWER_OF_TWO)
    if ROW:
        tl.store(row_scales + tl.program_id(0) * row_stride + tl.program_id(1), decode)
    if COLUMN:
        tl.store(column_scales + tl.program_id(1) * column_stride + tl.program_id(0), decode)
    store_codes(row_codes, column_codes, tile * encode, m, n, rows, columns, ROW, COLUMN, 448.0)
