"""NVFP4 on a GPU: one pass for the amaxes, one pass for the values of both layouts.

A linear layer needs its input (and its output's gradient) twice: in blocks along the features, and rotated in blocks
along the tokens. Both are written from one read. The second is the quantized TRANSPOSE, kept in the layout of x: a BF16
GEMM takes either operand order, so nothing is transposed in memory.

A program owns 16 rows. Along tokens, each thread holds the same few columns of all of them, so that the rotation, the
amax of a block and its random bytes stay in registers. Along features, the program then takes a few rows at a time, and
finds them in the L1 cache.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    SLOTS,
    block_scales,
    byte_dithers,
    dither_of,
    e2m1_values,
    element_words,
    first_down,
    laid_out_like,
    larger,
    load_amax,
    place,
    rounded_to,
    row_words,
    spread,
    store_amax,
    tensor_scales,
    to_float32,
)
from nvfp4_train.precision.kernels.rows import largest_of, load_rows, rotated_rows

# Rows that a program quantizes at a time along features.
ROWS = tl.constexpr(4)


@triton.jit
def amax_kernel(
    x, amax, groups, columns, ROW: tl.constexpr, COLUMN: tl.constexpr, SIGNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Slots of max |x| and, after them, of max |rotated x^T|. SLOTS programs share the groups of 16 rows."""
    row_largest = tl.zeros((BLOCK,), x.dtype.element_ty)
    column_largest = tl.zeros((BLOCK,), tl.float32)
    across = tl.cdiv(columns, BLOCK)
    tile = tl.program_id(0)
    while tile < groups * across:
        n = tile % across * BLOCK + tl.arange(0, BLOCK)
        rows = load_rows(x + (tile // across).to(tl.int64) * 16 * columns, columns, n, n < columns, 16)
        if ROW:
            for i in tl.static_range(16):
                row_largest = larger(row_largest, rows[i])
        if COLUMN:
            if SIGNS >= 0:
                rows = rotated_rows(rows, SIGNS, 16)
            for i in tl.static_range(16):
                column_largest = larger(column_largest, to_float32(rows[i]))
        tile += SLOTS
    if ROW:
        store_amax(amax, to_float32(row_largest))
    if COLUMN:  # rounding the largest is rounding all: it keeps the order
        store_amax(amax + SLOTS, to_float32(rounded_to(column_largest, x.dtype.element_ty)))


@triton.jit
def stored_scales(amax, scales):
    """s_enc of a tensor from its amax slots; one program of the grid writes s_dec and amax to `scales`."""
    amax_bits = load_amax(amax)
    encode, decode = tensor_scales(amax_bits)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scales, decode)
        tl.store(scales + 1, amax_bits.to(tl.float32, bitcast=True))
    return encode


@triton.jit
def column_values(
    x, out, encode, key, columns, first, n, row_blocks, column_blocks, whole_rows, STOCHASTIC: tl.constexpr,
    SIGNS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Values of 16 rows from `first` on, rotated where SIGNS >= 0, in blocks along the rows."""
    mask = n < columns
    base = first * columns
    operand = load_rows(x + base, columns, n, mask, 16)
    if SIGNS >= 0:
        rotated = rotated_rows(operand, SIGNS, 16)
        operand = ()
        for i in tl.static_range(16):
            operand = operand + (rounded_to(rotated[i], x.dtype.element_ty),)
    scale, block_encode = block_scales(largest_of(operand, 16), encode)
    scale, limit = spread(scale, operand[0])
    words = operand
    if STOCHASTIC:
        here = laid_out_like(n, operand[0])
        down = first_down(here, column_blocks, whole_rows, mask, SPLIT)
        words = element_words(tl.load(key), down + place(row_blocks, first // 16, True, SPLIT))
    for i in tl.static_range(16):
        dither = operand[i]
        if STOCHASTIC:
            dither = dither_of(words[i // 4], i % 4)
        values = e2m1_values(operand[i], block_encode, scale, limit, dither, STOCHASTIC)
        tl.store(out + base + (i * columns + n), values, mask=mask)


@triton.jit
def row_values(
    x, out, encode, key, columns, first, block, row_blocks, column_blocks, whole_columns, STOCHASTIC: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Values of ROWS rows from `first` on, in blocks along columns: BLOCK / 16 of them, from number `block` on."""
    row = tl.arange(0, ROWS)[:, None]
    n = block * 16 + tl.arange(0, BLOCK)[None, :]
    offset = row * columns + n
    mask = n < columns
    tile = tl.load(x + first * columns + offset, mask=mask, other=0.0)
    blocks = tl.reshape(tile, (ROWS, BLOCK // 16, 16))
    scale, block_encode = block_scales(tl.max(tl.abs(to_float32(blocks)), 2), encode)
    dither = blocks
    if STOCHASTIC:
        words = row_words(
            tl.load(key), row, first, block, columns, row_blocks, column_blocks, whole_columns, SPLIT, BLOCK // 16
        )  # fmt: skip
        dither = byte_dithers(words, ROWS, BLOCK // 16)
    values = e2m1_values(blocks, block_encode[:, :, None], *spread(scale[:, :, None], blocks), dither, STOCHASTIC)
    tl.store(out + first * columns + offset, tl.reshape(values, (ROWS, BLOCK)), mask=mask)


@triton.jit(do_not_specialize=["row_key", "column_key"])
def values_kernel(
    x,
    amax,
    row_out,
    column_out,
    scales,
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
    BLOCK: tl.constexpr,
):
    """Values (element * block scale) of x in blocks along columns, and of its rotated transpose in blocks along rows.

    `scales` takes s_dec and amax of the first, then of the second. The keys of the random bits lie at `row_key` and
    `column_key`. Where x is a part of a matrix (`SPLIT`), the tables
    `row_blocks` and `column_blocks` say where its blocks of 16 lie in the whole, for the random bits.
    """
    # The amax pass went from the front to the back: what it read last is still in the L2 cache.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * 16
    if COLUMN:
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        encode = stored_scales(amax + SLOTS, scales + 2)
        column_values(
            x, column_out, encode, column_key, columns, first, n, row_blocks, column_blocks, whole_rows,
            COLUMN_STOCHASTIC, SIGNS, SPLIT,
        )  # fmt: skip
    if ROW:
        encode = stored_scales(amax, scales)
        for step in range(16 // ROWS):
            row_values(
                x, row_out, encode, row_key, columns, first + step * ROWS, tl.program_id(1) * (BLOCK // 16),
                row_blocks, column_blocks, whole_columns, ROW_STOCHASTIC, SPLIT, BLOCK,
            )  # fmt: skip


@triton.jit
def flat_amax_kernel(x, amax, count, BLOCK: tl.constexpr):
    """Slots of max |x| over a contiguous tensor of `count` elements."""
    largest = tl.zeros((BLOCK,), tl.float32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < count:
        i = start + tl.arange(0, BLOCK)
        largest = larger(largest, to_float32(tl.load(x + i, mask=i < count, other=0.0)))
        start += SLOTS * BLOCK
    store_amax(amax, largest)


@triton.jit
def square_values_kernel(w, amax, out, scales, columns, BLOCK: tl.constexpr):
    """Values of w in 16x16 tiles, and s_dec and amax. A tile serves w and its transpose, so fprop and dgrad alike."""
    first = tl.program_id(0).to(tl.int64) * 16
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < columns
    base = first * columns
    encode = stored_scales(amax, scales)
    rows = load_rows(w + base, columns, n, mask, 16)
    largest = tl.max(tl.reshape(largest_of(rows, 16), (BLOCK // 16, 16)), 1)
    scale, block_encode = block_scales(largest, encode)
    scale, limit = spread(scale[:, None], tl.reshape(rows[0], (BLOCK // 16, 16)))
    for i in tl.static_range(16):
        blocks = tl.reshape(rows[i], (BLOCK // 16, 16))
        values = e2m1_values(blocks, block_encode[:, None], scale, limit, blocks, False)
        tl.store(out + base + (i * columns + n), tl.reshape(values, (BLOCK,)), mask=mask)
