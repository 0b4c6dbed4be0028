"""FP8 on a GPU: codes as FP8 tensor cores read them, as they lie and transposed.

An FP8 GEMM wants the contraction of both operands contiguous. A linear contracts its input over features and, for the
weight gradient, over tokens, so each tensor is written twice: its codes as they lie, and transposed. A program owns a
tile of 128 x 128, which is a block of weights, and 128 blocks of 1 x 128 in either direction.

A tile is held as four: rows 0, 4, 8, ..., rows 1, 5, 9, ... and so on. A thread then has four neighbouring rows of its
columns, whose codes it packs into 32 bits, and 32-bit numbers are transposed four times as fast as bytes.

One launch may write two layouts of different codes, as of blocks along rows and along columns, but not the SAME codes
as they lie and transposed: the transposed ones came out as other bytes on an H200 (Triton 3.6), where Triton's
interpreter has them right and so has a launch for each layout alone. The launches keep to that.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    EXPONENT,
    FLOAT_MAX,
    INTERPRETED,
    MAGNITUDE,
    SIGN,
    SLOTS,
    load_amax,
    magnitude_bits,
    to_float32,
)

TILE = tl.constexpr(128)


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
def load_tile(x, rows, columns):
    """This program's tile as four of 32 x 128 in FP32, zeros beyond the matrix; its row quads and columns."""
    quad = tl.program_id(0).to(tl.int64) * (TILE // 4) + tl.arange(0, TILE // 4)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    parts = ()
    for i in tl.static_range(4):
        mask = (4 * quad + i < rows)[:, None] & (n < columns)[None, :]
        parts = parts + (to_float32(tl.load(x + (4 * quad + i)[:, None] * columns + n[None, :], mask=mask, other=0.0)),)
    return parts, quad, n


@triton.jit
def largest_bits(parts):
    """Bits of the largest magnitude of each four rows, [32, 128]."""
    bits = magnitude_bits(parts[0])
    for i in tl.static_range(1, 4):
        bits = tl.maximum(bits, magnitude_bits(parts[i]))
    return bits


@triton.jit
def store_row(row_codes, codes, i: tl.constexpr, quad, n, padded, columns):
    """Codes of every fourth row, from the i-th on, to [padded, columns]."""
    mask = (4 * quad + i < padded)[:, None] & (n < columns)[None, :]
    tl.store(row_codes + (4 * quad + i)[:, None] * columns + n[None, :], codes, mask=mask)


@triton.jit
def packed_into(word, codes, i: tl.constexpr):
    """`word` with the codes as its i-th byte."""
    byte = codes.to(tl.uint8, bitcast=True).to(tl.int32) << (8 * i)
    if i == 0:
        return byte
    else:
        return word | byte


@triton.jit
def store_columns(column_words, words, quad, n, padded, columns):
    """Codes of four rows a word, transposed, to [columns, padded / 4]."""
    mask = (n < columns)[:, None] & (4 * quad < padded)[None, :]
    tl.store(column_words + n[:, None].to(tl.int64) * (padded // 4) + quad[None, :], tl.trans(words), mask=mask)


@triton.jit
def store_codes(
    row_codes, column_words, parts, encode, quad, n, padded, columns, ROW: tl.constexpr, COLUMN: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Codes of parts * encode, as they lie and transposed."""
    words = magnitude_bits(parts[0])
    for i in tl.static_range(4):
        codes = fp8_codes(parts[i] * encode, LARGEST, row_codes.dtype.element_ty)
        if ROW:
            store_row(row_codes, codes, i, quad, n, padded, columns)
        if COLUMN:
            words = packed_into(words, codes, i)
    if COLUMN:
        store_columns(column_words, words, quad, n, padded, columns)


@triton.jit
def tensor_codes_kernel(
    x, amax, history, row_codes, column_words, scales, rows, padded, columns,
    ROW: tl.constexpr, COLUMN: tl.constexpr, DELAYED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Codes of x with one scale: of `amax`'s slots, or (DELAYED) of the amax in `history`.

    `scales` takes the decode scale and x's own amax. With a delayed scale the last program to finish writes them, when
    the slots are filled; it counts itself in the number behind the slots.
    """
    parts, quad, n = load_tile(x, rows, columns)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if DELAYED:
        encode, decode = fp8_scales(tl.load(history).to(tl.int32, bitcast=True), LARGEST, False)
        largest = tl.max(tl.max(largest_bits(parts), 1), 0)
        tl.atomic_max(amax + program % SLOTS, largest, sem="release")
        done = tl.atomic_add(amax + SLOTS, 1, sem="acq_rel") + 1
        if done == tl.num_programs(0) * tl.num_programs(1):
            store_scales(scales, amax, decode)
    else:
        encode, decode = fp8_scales(load_amax(amax), LARGEST, False)
        if program == 0:
            store_scales(scales, amax, decode)
    store_codes(row_codes, column_words, parts, encode, quad, n, padded, columns, ROW, COLUMN, LARGEST)


@triton.jit
def store_scales(scales, amax, decode):
    """The decode scale, NaN for a tensor that was not finite, and the tensor's amax."""
    amax_bits = load_amax(amax)
    tl.store(scales, tl.where(amax_bits < EXPONENT, decode, float("nan")))
    tl.store(scales + 1, amax_bits.to(tl.float32, bitcast=True))


@triton.jit
def row_blocks_kernel(
    x, row_codes, column_words, row_scales, column_scales, rows, padded, columns,
    ROW: tl.constexpr, COLUMN: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """E4M3 codes in blocks of 1 x 128 along the columns, and of x^T along its own; scales [blocks, operand rows]."""
    parts, quad, n = load_tile(x, rows, columns)
    if ROW:
        scales = row_scales + tl.program_id(1).to(tl.int64) * padded
        for i in tl.static_range(4):
            encode, decode = fp8_scales(tl.max(magnitude_bits(parts[i]), 1), 448.0, POWER_OF_TWO)
            tl.store(scales + 4 * quad + i, decode)
            codes = fp8_codes(parts[i] * encode[:, None], 448.0, row_codes.dtype.element_ty)
            store_row(row_codes, codes, i, quad, n, padded, columns)
    if COLUMN:
        encode, decode = fp8_scales(tl.max(largest_bits(parts), 0), 448.0, POWER_OF_TWO)
        tl.store(column_scales + tl.program_id(0).to(tl.int64) * columns + n, decode)
        store_codes(row_codes, column_words, parts, encode[None, :], quad, n, padded, columns, False, True, 448.0)


@triton.jit
def square_blocks_kernel(
    x, row_codes, column_words, row_scales, column_scales, rows, columns, row_stride, column_stride,
    ROW: tl.constexpr, COLUMN: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """E4M3 codes in blocks of 128 x 128; scales [operand rows / 128, stride] of x and of its transpose."""
    parts, quad, n = load_tile(x, rows, columns)
    encode, decode = fp8_scales(tl.max(tl.max(largest_bits(parts), 1), 0), 448.0, POWER_OF_TWO)
    if ROW:
        tl.store(row_scales + tl.program_id(0) * row_stride + tl.program_id(1), decode)
    if COLUMN:
        tl.store(column_scales + tl.program_id(1) * column_stride + tl.program_id(0), decode)
    store_codes(row_codes, column_words, parts, encode, quad, n, rows, columns, ROW, COLUMN, 448.0)
