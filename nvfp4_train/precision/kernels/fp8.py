"""FP8 on a GPU: codes as FP8 tensor cores read them, as they lie and transposed, from one read.

An FP8 GEMM wants the contraction of both operands contiguous. A linear contracts its input over features and, for the
weight gradient, over tokens, so each tensor is written twice: its codes as they lie, and transposed. With blocks, a
program owns a tile of 128 x 128, which is a block of weights, and 128 blocks of 1 x 128 in either direction; the last
blocks of a matrix may be partial.

The same codes are never stored as they lie and also taken apart into bytes to be transposed. ptxas (of Triton 3.6)
packs what is stored into words as it converts, and then reads the single codes out of registers that it has not set: on
an H200 the transposed copy was wrong, where Triton's interpreter had it right. So codes with one scale in both layouts
are converted twice. A tile is held as four, rows 0, 4, 8, ..., rows 1, 5, 9, ... and so on; a thread then has four
neighbouring rows of its columns, whose codes it converts into one 32-bit word, and words are what is transposed. Codes
of blocks along rows are other codes than those of blocks along columns, and may be transposed as bytes.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    EXPONENT,
    FLOAT_MAX,
    INTERPRETED,
    MAGNITUDE,
    SIGN,
    larger,
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
def code_words(parts, encode, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """Codes of parts * encode, those of four rows a word, the first in the lowest byte."""
    if INTERPRETED:
        words = magnitude_bits(parts[0]) * 0
        for i in tl.static_range(4):
            codes = fp8_codes(parts[i] * encode, LARGEST, dtype)
            words = words | (codes.to(tl.uint8, bitcast=True).to(tl.int32) << (8 * i))
    elif LARGEST == 448.0:
        words = tl.inline_asm_elementwise(
            "{.reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
            "mov.b32 $0, {lo, hi};}",
            "=r,f,f,f,f",
            [parts[0] * encode, parts[1] * encode, parts[2] * encode, parts[3] * encode],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        words = tl.inline_asm_elementwise(
            "{.reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1; cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3; "
            "mov.b32 $0, {lo, hi};}",
            "=r,f,f,f,f",
            [parts[0] * encode, parts[1] * encode, parts[2] * encode, parts[3] * encode],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def load(x, m, n, rows, columns):
    """Rows m (int64) and columns n of x, zeros beyond the matrix."""
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    return tl.load(x + m[:, None] * columns + n[None, :], mask=mask, other=0.0)


@triton.jit
def load_parts(x, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's tile as four in FP32; its row quads and columns."""
    quad = tl.program_id(0).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    parts = ()
    for i in tl.static_range(4):
        parts = parts + (to_float32(load(x, 4 * quad + i, n, rows, columns)),)
    return parts, quad, n


@triton.jit
def largest_bits(parts):
    """Bits of the largest magnitude of each four rows."""
    bits = magnitude_bits(parts[0])
    for i in tl.static_range(1, 4):
        bits = tl.maximum(bits, magnitude_bits(parts[i]))
    return bits


@triton.jit
def store_rows(row_codes, codes, m, n, padded, columns):
    """Codes of rows m as they lie, to [padded, columns]."""
    mask = (m < padded)[:, None] & (n < columns)[None, :]
    tl.store(row_codes + m[:, None] * columns + n[None, :], codes, mask=mask)


@triton.jit
def store_columns(column_codes, codes, m, n, padded, columns):
    """Codes of rows m, or words of four rows, transposed, to [columns, padded]."""
    mask = (n < columns)[:, None] & (m < padded)[None, :]
    tl.store(column_codes + n[:, None].to(tl.int64) * padded + m[None, :], tl.trans(codes), mask=mask)


@triton.jit
def store_codes(
    row_codes, column_codes, parts, encode, quad, n, padded, columns, ROW: tl.constexpr, COLUMN: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Codes of parts * encode in the layouts that are wanted."""
    dtype: tl.constexpr = row_codes.dtype.element_ty
    if ROW:
        for i in tl.static_range(4):
            store_rows(row_codes, fp8_codes(parts[i] * encode, LARGEST, dtype), 4 * quad + i, n, padded, columns)
    if COLUMN:
        words = code_words(parts, encode, LARGEST, dtype)
        store_columns(column_codes.to(tl.pointer_type(tl.int32), bitcast=True), words, quad, n, padded // 4, columns)


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
    parts, quad, n = load_parts(x, rows, columns, ROWS, COLUMNS)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    if DELAYED:
        encode, decode = fp8_scales(tl.load(amax).to(tl.int32, bitcast=True), LARGEST, False)
        largest = tl.max(tl.max(largest_bits(parts), 1), 0)
        enter_largest(seen, largest)
        if largest >= EXPONENT:
            enter_largest(scale, NAN)
        elif first:
            enter_largest(scale, decode.to(tl.int32, bitcast=True))
    else:
        encode, decode = fp8_scales(load_amax(amax), LARGEST, False)
        if first:
            tl.store(scale, decode)
    store_codes(row_codes, column_codes, parts, encode, quad, n, padded, columns, ROW, COLUMN, LARGEST)


@triton.jit
def store_scales(scales, block_amax, index, limit, POWER_OF_TWO: tl.constexpr):
    """Decode scales of blocks, to `scales` + `index` < `limit`; returns the encode scales.

    Encode scales are wanted by every thread that holds a part of a block. The others are divided once, by the thread
    that stores them: `gather` takes their amaxes there.
    """
    encode, _ = fp8_scales(block_amax, 448.0, POWER_OF_TWO)
    stored = tl.gather(block_amax, tl.arange(0, block_amax.shape[0]), 0)
    tl.store(scales + index, fp8_scales(stored, 448.0, POWER_OF_TWO)[1], mask=index < limit)
    return encode


@triton.jit
def row_blocks_kernel(
    x, row_codes, column_codes, row_scales, column_scales, rows, padded, columns,
    ROW: tl.constexpr, COLUMN: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """E4M3 codes in blocks of 1 x 128 along the columns, and of x^T along its own; scales [blocks, operand rows].

    Blocks along the rows need their amaxes first. A tile is then read again, out of the cache, a few rows at a time:
    held in registers as a whole, it leaves room for too few programs.
    """
    first = tl.program_id(0).to(tl.int64) * TILE
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dtype: tl.constexpr = row_codes.dtype.element_ty
    if COLUMN:
        largest = load(x, first + tl.arange(0, ROWS // 2), n, rows, columns)
        for i in tl.static_range(1, 2 * TILE // ROWS):
            largest = larger(largest, load(x, first + i * (ROWS // 2) + tl.arange(0, ROWS // 2), n, rows, columns))
        block_amax = tl.max(magnitude_bits(to_float32(largest)), 0)
        scales = column_scales + tl.program_id(0).to(tl.int64) * columns
        column_encode = store_scales(scales, block_amax, n, columns, POWER_OF_TWO)
    for i in range(TILE // ROWS):
        m = first + i * ROWS + tl.arange(0, ROWS)
        tile = to_float32(load(x, m, n, rows, columns))
        if ROW:
            scales = row_scales + tl.program_id(1).to(tl.int64) * padded
            encode = store_scales(scales, tl.max(magnitude_bits(tile), 1), m, padded, POWER_OF_TWO)
            store_rows(row_codes, fp8_codes(tile * encode[:, None], 448.0, dtype), m, n, padded, columns)
        if COLUMN:
            codes = fp8_codes(tile * column_encode[None, :], 448.0, dtype)
            store_columns(column_codes, codes, m, n, padded, columns)


@triton.jit
def square_blocks_kernel(
    x, row_codes, column_codes, row_scales, column_scales, rows, columns, row_stride, column_stride,
    ROW: tl.constexpr, COLUMN: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """E4M3 codes in blocks of 128 x 128; scales [operand rows / 128, stride] of x and of its transpose."""
    parts, quad, n = load_parts(x, rows, columns, TILE, TILE)
    encode, decode = fp8_scales(tl.max(tl.max(largest_bits(parts), 1), 0), 448.0, POWER_OF_TWO)
    if ROW:
        tl.store(row_scales + tl.program_id(0) * row_stride + tl.program_id(1), decode)
    if COLUMN:
        tl.store(column_scales + tl.program_id(1) * column_stride + tl.program_id(0), decode)
    store_codes(row_codes, column_codes, parts, encode, quad, n, rows, columns, ROW, COLUMN, 448.0)
