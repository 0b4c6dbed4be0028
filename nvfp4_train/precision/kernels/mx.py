"""MXFP4 and MXFP8 on a GPU: one pass, since no scale needs more than its block of 32.

As in `nvfp4.py`: values along features, and of the (rotated) transpose along tokens, from one read of 32 rows.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    EXPONENT,
    bounded_nearest,
    byte_dithers,
    dither_of,
    e2m1_stochastic,
    element_words,
    first_down,
    laid_out_like,
    magnitude_bits,
    place,
    rounded_to,
    row_words,
    scaled_magnitude,
    signed_bfloat16,
    to_float32,
)
from nvfp4_train.precision.kernels.rows import largest_of, load_rows, rotated_rows

SIZE = tl.constexpr(32)
# Rows that a program quantizes at a time along features.
ROWS = tl.constexpr(8)


@triton.jit
def power_of_two(exponent):
    """2^e as FP32 for -127 <= e <= 127."""
    return tl.where(exponent == -127, 0x00400000, (exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def mx_scales(amax_bits, MANTISSA: tl.constexpr, UP: tl.constexpr):
    """(encode, decode) scales of blocks with these bits of amaxes: 2^-e and 2^e, the latter NaN for a block with one.

    The exponent that divides amax to at most the element type's largest (1.5 * 2^2 or 1.75 * 2^8) is one higher where
    amax has more after its leading bit; an addition carries it. A denormal amax comes out below -127 either way.
    """
    if MANTISSA == 1:
        carry: tl.constexpr = 0x3FFFFF if UP else 0
        EMAX: tl.constexpr = 2
    else:
        carry: tl.constexpr = 0x1FFFFF if UP else 0
        EMAX: tl.constexpr = 8
    finite = amax_bits < EXPONENT
    exponent = tl.where(finite, ((amax_bits + carry) >> 23) - 127 - EMAX, -127)
    exponent = tl.maximum(exponent, -127)
    return power_of_two(-exponent), tl.where(finite, power_of_two(exponent), float("nan"))


@triton.jit
def mx_values(x, encode, decode, dither, MANTISSA: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Element nearest to (or a random neighbour of) x * encode, times decode, rounded to BF16."""
    magnitude = scaled_magnitude(x, encode)
    if STOCHASTIC:
        rounded = e2m1_stochastic(tl.minimum(magnitude, 6.0), dither)
    else:
        rounded = bounded_nearest(magnitude, MANTISSA)
    return signed_bfloat16(rounded * decode, x)


@triton.jit
def mx_columns(
    x, out, key, columns, first, n, row_blocks, column_blocks, whole_rows, STOCHASTIC: tl.constexpr,
    SIGNS: tl.constexpr, SPLIT: tl.constexpr, MANTISSA: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """Values of 32 rows from `first` on, rotated where SIGNS >= 0, in blocks along the rows."""
    mask = n < columns
    base = first * columns
    operand = load_rows(x + base, columns, n, mask, 32)
    if SIGNS >= 0:
        rotated = rotated_rows(operand, SIGNS, 32)
        operand = ()
        for i in tl.static_range(32):
            operand = operand + (rounded_to(rotated[i], x.dtype.element_ty),)
    encode, decode = mx_scales(magnitude_bits(largest_of(operand, 32)), MANTISSA, UP)
    words = operand
    if STOCHASTIC:
        row = first_down(laid_out_like(n, operand[0]), column_blocks, whole_rows, mask, SPLIT)
        key = tl.load(key)
        words = element_words(key, row + place(row_blocks, first // 16, True, SPLIT))
        words = words + element_words(key, row + place(row_blocks, first // 16 + 1, True, SPLIT))
    for i in tl.static_range(32):
        dither = operand[i]
        if STOCHASTIC:
            dither = dither_of(words[i // 4], i % 4)
        values = mx_values(operand[i], encode, decode, dither, MANTISSA, STOCHASTIC)
        tl.store(out + base + (i * columns + n), values, mask=mask)


@triton.jit
def mx_rows(
    x, out, key, columns, first, block, row_blocks, column_blocks, whole_columns, STOCHASTIC: tl.constexpr,
    SPLIT: tl.constexpr, MANTISSA: tl.constexpr, UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Values of ROWS rows from `first` on, in blocks along columns: BLOCK of them, the first is 16 * `block`."""
    row = tl.arange(0, ROWS)[:, None]
    n = block * 16 + tl.arange(0, BLOCK)[None, :]
    offset = row * columns + n
    mask = n < columns
    tile = tl.load(x + first * columns + offset, mask=mask, other=0.0)
    blocks = tl.reshape(tile, (ROWS, BLOCK // SIZE, SIZE))
    encode, decode = mx_scales(tl.max(magnitude_bits(to_float32(blocks)), 2), MANTISSA, UP)
    dither = blocks
    if STOCHASTIC:
        words = row_words(
            tl.load(key), row, first, block, columns, row_blocks, column_blocks, whole_columns, SPLIT, BLOCK // 16
        )  # fmt: skip
        dither = tl.reshape(byte_dithers(words, ROWS, BLOCK // 16), blocks.shape)
    values = mx_values(blocks, encode[:, :, None], decode[:, :, None], dither, MANTISSA, STOCHASTIC)
    tl.store(out + first * columns + offset, tl.reshape(values, (ROWS, BLOCK)), mask=mask)


@triton.jit(do_not_specialize=["row_key", "column_key"])
def mx_kernel(
    x,
    row_out,
    column_out,
    row_blocks,
    column_blocks,
    columns,
    whole_rows,
    whole_columns,
    row_key,
    column_key,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    ROW_STOCHASTIC: tl.constexpr,
    COLUMN_STOCHASTIC: tl.constexpr,
    SIGNS: tl.constexpr,
    SPLIT: tl.constexpr,
    MANTISSA: tl.constexpr,
    ROW_UP: tl.constexpr,
    COLUMN_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Values of x in blocks along columns, and of its (rotated) transpose in blocks along rows.

    The keys, `row_blocks`, `column_blocks` and SPLIT as in `nvfp4.values_kernel`.
    """
    first = tl.program_id(0).to(tl.int64) * SIZE
    if COLUMN:
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mx_columns(
            x, column_out, column_key, columns, first, n, row_blocks, column_blocks, whole_rows, COLUMN_STOCHASTIC,
            SIGNS, SPLIT, MANTISSA, COLUMN_UP,
        )  # fmt: skip
    if ROW:
        for step in range(SIZE // ROWS):
            mx_rows(
                x, row_out, row_key, columns, first + step * ROWS, tl.program_id(1) * (BLOCK // 16), row_blocks,
                column_blocks, whole_columns, ROW_STOCHASTIC, SPLIT, MANTISSA, ROW_UP, BLOCK,
            )  # fmt: skip


@triton.jit
def mx_square_kernel(x, out, columns, MANTISSA: tl.constexpr, UP: tl.constexpr, BLOCK: tl.constexpr):
    """Values of x in 32x32 tiles, which serve x and its transpose."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < columns
    base = tl.program_id(0).to(tl.int64) * SIZE * columns
    rows = load_rows(x + base, columns, n, mask, 32)
    bits = tl.max(tl.reshape(magnitude_bits(largest_of(rows, 32)), (BLOCK // SIZE, SIZE)), 1)
    encode, decode = mx_scales(bits, MANTISSA, UP)
    for i in tl.static_range(32):
        blocks = tl.reshape(rows[i], (BLOCK // SIZE, SIZE))
        values = mx_values(blocks, encode[:, None], decode[:, None], blocks, MANTISSA, False)
        tl.store(out + base + (i * columns + n), tl.reshape(values, (BLOCK,)), mask=mask)
