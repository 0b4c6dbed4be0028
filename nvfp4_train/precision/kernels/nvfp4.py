"""NVFP4 on a GPU: one pass for the amaxes, one pass for the values of both layouts.

A linear layer needs its input (and its output's gradient) twice: in blocks along the features, and rotated in blocks
along the tokens. Both are written from one read. The second is the quantized TRANSPOSE, kept in the layout of x: a BF16
GEMM takes either operand order, so nothing is transposed in memory.

A program owns 16 rows. Along tokens, each thread holds the same few columns of all of them; along features, the program
then takes a few rows at a time, which it finds in the L1 cache, and each thread whole blocks, or halves of them where
it rounds to the nearest. So the rotation, the amax of a block, its scales and its random bytes stay in registers.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    SLOTS,
    block_scales,
    e2m1_nearest,
    laid_out_like,
    larger,
    load_amax,
    rounded_to,
    store_amax,
    tensor_scales,
    to_float32,
)
from nvfp4_train.precision.kernels.four_over_six import MAE, better_values, ordinary
from nvfp4_train.precision.kernels.four_over_six import TOP as SIX_TOP
from nvfp4_train.precision.kernels.rows import (
    blocks_across,
    eights_across,
    for_each_eight,
    largest_across,
    largest_of,
    largest_of_eights,
    load_blocks,
    load_rows,
    rotated_rows,
    store_half_blocks,
)
from nvfp4_train.precision.kernels.stochastic import (
    dither_of,
    dithers_across,
    e2m1_stochastic,
    element_words,
    first_down,
    magnitudes_to_cut,
    place,
    read_keys,
    words_across,
)

# Largest product of a block scale and an element.
TOP = tl.constexpr(448.0 * 6.0)


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
def stored_scales(amax, scales, TOP: tl.constexpr):
    """(s_enc, amax) of a tensor from its amax slots; one program of the grid writes s_dec and amax to `scales`."""
    amax_bits = load_amax(amax)
    largest = amax_bits.to(tl.float32, bitcast=True)
    encode, decode = tensor_scales(amax_bits, TOP)
    one = tl.program_id(0) + tl.program_id(1) == 0
    tl.store(scales, decode, mask=one)
    tl.store(scales + 1, largest, mask=one)
    return encode, largest


@triton.jit
def column_operand(x, columns, first, n, mask, SIGNS: tl.constexpr):
    """16 rows from `first` on, rotated where SIGNS >= 0."""
    rows = load_rows(x + first * columns, columns, n, mask, 16)
    if SIGNS >= 0:
        rotated = rotated_rows(rows, SIGNS, 16)
        rows = ()
        for i in tl.static_range(16):
            rows = rows + (rounded_to(rotated[i], x.dtype.element_ty),)
    return rows


@triton.jit
def column_values(
    operand, out, encode, key, columns, first, n, mask, row_blocks, column_blocks, whole_rows, STOCHASTIC: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Values of 16 rows from `first` on, in blocks along the rows."""
    scale, block_encode = block_scales(largest_of(operand, 16), encode)
    scale = scale.to(tl.bfloat16)
    words = operand
    if STOCHASTIC:
        down = first_down(laid_out_like(n, operand[0]), column_blocks, whole_rows, mask, SPLIT)
        words = element_words(key, down + place(row_blocks, first // 16, True, SPLIT))
    for i in tl.static_range(16):
        if STOCHASTIC:
            magnitude = magnitudes_to_cut(operand[i], block_encode, False)
            values = e2m1_stochastic(magnitude, operand[i], scale, dither_of(words[i // 4], i % 4))
        else:
            values = e2m1_nearest(operand[i], block_encode, scale)
        tl.store(out + first * columns + (i * columns + n), values, mask=mask)


@triton.jit
def row_operand(x, columns, block, WHOLE: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS rows of x, in BLOCK columns from block number `block` on: a thread has WHOLE blocks, or eights."""
    if WHOLE:
        row, number, mask = blocks_across(columns, block, FULL, ROWS, BLOCK)
        return load_blocks(x, row * columns + number * 16, mask)
    else:
        offset, mask = eights_across(columns, block, FULL, ROWS, BLOCK)
        return tl.load(x + offset, mask=mask, other=0.0)


@triton.jit
def nearest_values(
    eights, out, encode, columns, block, FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Values of what `row_operand` gave, rounded to the nearest."""
    offset, mask = eights_across(columns, block, FULL, ROWS, BLOCK)
    scale, block_encode = block_scales(largest_of_eights(eights, 2).to(tl.float32, bitcast=True), encode)
    block_encode = for_each_eight(block_encode, eights, 2)
    values = e2m1_nearest(eights, block_encode, for_each_eight(scale.to(tl.bfloat16), eights, 2))
    tl.store(out + offset, values, mask=mask)


@triton.jit
def stochastic_values(
    blocks, out, encode, key, columns, first, block, row_blocks, column_blocks, whole_columns, SPLIT: tl.constexpr,
    FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Values of what `row_operand` gave, whole blocks of rows from `first` on, rounded stochastically."""
    row, number, mask = blocks_across(columns, block, FULL, ROWS, BLOCK)
    largest = largest_across(blocks)
    scale, block_encode = block_scales(largest, encode)
    block_encode = tl.broadcast_to(block_encode[:, None], blocks[0].shape)
    scale = tl.broadcast_to(scale.to(tl.bfloat16)[:, None], blocks[0].shape)
    words = words_across(
        key, first, laid_out_like(row, largest), laid_out_like(number, largest), columns, row_blocks, column_blocks,
        whole_columns, SPLIT,
    )  # fmt: skip
    for half in tl.static_range(2):
        magnitude = magnitudes_to_cut(blocks[half], block_encode, False)
        dithers = dithers_across(words[2 * half], words[2 * half + 1])
        values = e2m1_stochastic(magnitude, blocks[half], scale, dithers)
        store_half_blocks(out, row * columns + number * 16, mask, half, values)


@triton.jit
def row_values(
    loaded, out, encode, amax, key, columns, first, block, row_blocks, column_blocks, whole_columns,
    STOCHASTIC: tl.constexpr, MEASURE: tl.constexpr, SPLIT: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Values of what `row_operand` gave for rows from `first` on."""
    out += first * columns
    if MEASURE:
        row, number, mask = blocks_across(columns, block, FULL, ROWS, BLOCK)
        left, right = better_values(loaded, encode, amax, ordinary(amax), MEASURE == MAE, False)
        store_half_blocks(out, row * columns + number * 16, mask, 0, left)
        store_half_blocks(out, row * columns + number * 16, mask, 1, right)
    elif STOCHASTIC:
        stochastic_values(
            loaded, out, encode, key, columns, first, block, row_blocks, column_blocks, whole_columns, SPLIT, FULL,
            ROWS, BLOCK,
        )  # fmt: skip
    else:
        nearest_values(loaded, out, encode, columns, block, FULL, ROWS, BLOCK)


@triton.jit(do_not_specialize=["row_key", "column_key"])
def values_kernel(
    x, amax, row_out, column_out, scales, row_blocks, column_blocks, row_key, column_key, columns, whole_rows,
    whole_columns, ROW: tl.constexpr, COLUMN: tl.constexpr, ROW_STOCHASTIC: tl.constexpr,
    COLUMN_STOCHASTIC: tl.constexpr, MEASURE: tl.constexpr, SIGNS: tl.constexpr, SPLIT: tl.constexpr,
    FULL: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Values (element * block scale) of x in blocks along columns, and of its rotated transpose in blocks along rows.

    `scales` takes s_dec and amax of the first, then of the second. The first follow four over six where MEASURE is
    MSE or MAE. The keys of the random bits lie at `row_key` and `column_key`. Where x is a part of a matrix (`SPLIT`),
    the tables `row_blocks` and `column_blocks` say where its blocks of 16 lie in the whole, for the random bits. FULL:
    every program has all of its BLOCK columns.
    """
    row_key, column_key = read_keys(row_key, column_key, ROW_STOCHASTIC, COLUMN_STOCHASTIC)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (n < columns) | FULL
    # The amax pass went from the front to the back: what it read last is still in the L2 cache. Programs that run at
    # once have whole rows.
    first = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64) * 16
    # Rows at a time along features: two blocks a thread, or one of four over six, which takes more registers.
    ROWS: tl.constexpr = 1024 * WARPS // BLOCK if not MEASURE else 512 * WARPS // BLOCK
    WHOLE: tl.constexpr = ROW_STOCHASTIC or MEASURE
    block = tl.program_id(0) * (BLOCK // 16)
    operand = ()
    if COLUMN:
        operand = column_operand(x, columns, first, n, mask, SIGNS)
    else:
        loaded = row_operand(x + first * columns, columns, block, WHOLE, FULL, ROWS, BLOCK)
    row_encode, row_largest = 1.0, 1.0
    if ROW:
        row_encode, row_largest = stored_scales(amax, scales, SIX_TOP if MEASURE else TOP)
    if COLUMN:
        column_encode, _ = stored_scales(amax + SLOTS, scales + 2, TOP)
        column_values(
            operand, column_out, column_encode, column_key, columns, first, n, mask, row_blocks, column_blocks,
            whole_rows, COLUMN_STOCHASTIC, SPLIT,
        )  # fmt: skip
    if ROW:
        for step in range(16 // ROWS):
            here = first + step * ROWS
            if COLUMN:  # from the L1 cache
                now = row_operand(x + here * columns, columns, block, WHOLE, FULL, ROWS, BLOCK)
            else:  # the next rows are on their way while these are quantized
                now = loaded
                following = first + tl.minimum(step + 1, 16 // ROWS - 1) * ROWS
                loaded = row_operand(x + following * columns, columns, block, WHOLE, FULL, ROWS, BLOCK)
            row_values(
                now, row_out, row_encode, row_largest, row_key, columns, here, block, row_blocks, column_blocks,
                whole_columns, ROW_STOCHASTIC, MEASURE, SPLIT, FULL, ROWS, BLOCK,
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
    encode, _ = stored_scales(amax, scales, TOP)
    rows = load_rows(w + base, columns, n, mask, 16)
    largest = tl.max(tl.reshape(largest_of(rows, 16), (BLOCK // 16, 16)), 1)
    scale, block_encode = block_scales(largest, encode)
    scale = tl.broadcast_to(scale.to(tl.bfloat16)[:, None], (BLOCK // 16, 16))
    for i in tl.static_range(16):
        blocks = tl.reshape(rows[i], (BLOCK // 16, 16))
        values = e2m1_nearest(blocks, block_encode[:, None], scale)
        tl.store(out + base + (i * columns + n), tl.reshape(values, (BLOCK,)), mask=mask)


@triton.jit
def square_four_over_six_kernel(w, amax, out, scales, columns, MEASURE: tl.constexpr, BLOCK: tl.constexpr):
    """The same with the better of two scales for each tile."""
    encode, largest = stored_scales(amax, scales, SIX_TOP)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * 16
    row, number, mask = blocks_across(columns, tl.program_id(1) * (BLOCK // 16), False, 16, BLOCK)
    offset = row * columns + number * 16
    blocks = load_blocks(w + first * columns, offset, mask)
    left, right = better_values(blocks, encode, largest, ordinary(largest), MEASURE == MAE, True)
    store_half_blocks(out + first * columns, offset, mask, 0, left)
    store_half_blocks(out + first * columns, offset, mask, 1, right)
