"""NVFP4 on a GPU: one pass for the amaxes, one pass for the values of both layouts.

A linear layer needs its input (and its output's gradient) twice: in blocks along the features, and rotated in blocks
along the tokens. Both are written from one read. The second is the quantized TRANSPOSE, kept in the layout of x: a BF16
GEMM takes either operand order, so nothing is transposed in memory.

A program owns 16 rows. Each thread holds the same few columns of all of them, so that the rotation along tokens, the
amax of a block along tokens and its random bytes stay in registers.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    SLOT_STRIDE,
    SLOTS,
    block_scales,
    dither_of,
    e2m1,
    element_words,
    four_rows_of_words,
    hadamard16,
    larger,
    load_amax,
    random_dither,
    rounded_to,
    store_amax,
    tensor_scales,
    to_float32,
)

# int32 numbers of an amax buffer, the second for the rotated copy; they start at zero.
AMAX_SIZE = tl.constexpr(SLOTS * SLOT_STRIDE)


@triton.jit
def load_rows(base, columns, mask):
    """16 rows from `base` on, FP32; zeros where masked."""
    rows = ()
    for i in tl.static_range(16):
        rows = rows + (to_float32(tl.load(base + i * columns, mask=mask, other=0.0)),)
    return rows


@triton.jit
def largest_of(rows):
    """Largest magnitude of 16 rows, column by column."""
    largest = tl.abs(rows[0])
    for i in tl.static_range(1, 16):
        largest = tl.maximum(largest, tl.abs(rows[i]))
    return largest


@triton.jit
def rotated_rows(rows, signs: tl.constexpr):
    """16 rows times diag(sign) / 4 * H16 along the rows, unrounded; bit i of `signs` is set where sign i is -1."""
    scaled = ()
    for i in tl.static_range(16):
        if (signs >> i) & 1:
            scaled = scaled + (rows[i] * -0.25,)
        else:
            scaled = scaled + (rows[i] * 0.25,)
    return hadamard16(scaled)


@triton.jit
def amax_kernel(
    x, amax, groups, columns, ROW: tl.constexpr, COLUMN: tl.constexpr, SIGNS: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Slots of max |x| and, after them, of max |rotated x^T|. A program looks at `GROUPS` groups of 16 rows."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row_largest = tl.zeros((BLOCK,), tl.float32)
    column_largest = tl.zeros((BLOCK,), tl.float32)
    for step in range(GROUPS):
        group = tl.program_id(0) * GROUPS + step
        mask = (n < columns) & (group < groups)
        rows = load_rows(x + group.to(tl.int64) * 16 * columns + n, columns, mask)
        if ROW:
            for i in tl.static_range(16):
                row_largest = larger(row_largest, rows[i])
        if COLUMN:
            if SIGNS >= 0:
                rows = rotated_rows(rows, SIGNS)
            for i in tl.static_range(16):
                column_largest = larger(column_largest, rows[i])
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if ROW:
        store_amax(amax, program, row_largest)
    if COLUMN:  # rounding the largest is rounding all: it keeps the order
        store_amax(amax + AMAX_SIZE, program, rounded_to(column_largest, x.dtype.element_ty))


@triton.jit
def row_values(row, encode, words, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    """Values of one row in blocks of 16 columns; `words` hold a random byte for each element."""
    scale, block_encode = block_scales(tl.max(tl.abs(tl.reshape(row, (BLOCK // 16, 16))), 1), encode)
    scale = tl.reshape(tl.broadcast_to(scale[:, None], (BLOCK // 16, 16)), (BLOCK,))
    block_encode = tl.reshape(tl.broadcast_to(block_encode[:, None], (BLOCK // 16, 16)), (BLOCK,))
    dither = row
    if STOCHASTIC:
        shifts = 8 * tl.arange(0, 4)[None, :].to(tl.uint32)
        byte = tl.reshape((words[:, None] >> shifts) & 0xFF, (BLOCK,)).to(tl.int32)
        dither = dither_of(byte << 15)
    return e2m1(row * block_encode, dither, STOCHASTIC) * scale


@triton.jit
def stored_scales(amax, scales):
    """s_enc of a tensor from its amax slots; one program of the grid writes s_dec and amax to `scales`."""
    amax_bits = load_amax(amax)
    encode, decode = tensor_scales(amax_bits)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scales, decode)
        tl.store(scales + 1, amax_bits.to(tl.float32, bitcast=True))
    return encode


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

    `scales` takes s_dec and amax of the first, then of the second. Where x is a part of a matrix (`SPLIT`), the tables
    `row_blocks` and `column_blocks` say where its blocks of 16 lie in the whole, for the random bits.
    """
    first = tl.program_id(0).to(tl.int64) * 16
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < columns
    base = first * columns + n
    rows = load_rows(x + base, columns, mask)
    blocks = tl.program_id(1) * (BLOCK // 16) + tl.arange(0, BLOCK // 4) // 4
    whole_first, whole_n = first, n.to(tl.int64)
    if SPLIT:
        blocks = tl.load(column_blocks + blocks, mask=blocks < columns // 16, other=0)
        whole_first = tl.load(row_blocks + tl.program_id(0)) * 16
        whole_n = tl.load(column_blocks + n // 16, mask=mask, other=0) * 16 + n % 16
    if ROW:
        encode = stored_scales(amax, scales)
        words = rows
        for i in tl.static_range(16):
            if ROW_STOCHASTIC and i % 4 == 0:
                stride = whole_columns // 16
                words = four_rows_of_words(row_key, (whole_first + i) * stride, stride, blocks, BLOCK)
            values = row_values(rows[i], encode, words[i % 4], ROW_STOCHASTIC, BLOCK)
            tl.store(row_out + base + i * columns, values.to(row_out.dtype.element_ty), mask=mask)
    if COLUMN:
        encode = stored_scales(amax + AMAX_SIZE, scales + 2)
        if SIGNS >= 0:
            rows = rotated_rows(rows, SIGNS)
        operand = ()
        for i in tl.static_range(16):
            operand = operand + (rounded_to(rows[i], x.dtype.element_ty),)
        largest = largest_of(operand)
        scale, block_encode = block_scales(largest, encode)
        words = operand
        if COLUMN_STOCHASTIC:
            words = element_words(column_key, (whole_n * whole_rows + whole_first) // 16)
        for i in tl.static_range(16):
            dither = largest
            if COLUMN_STOCHASTIC:
                dither = random_dither(words, i)
            values = e2m1(operand[i] * block_encode, dither, COLUMN_STOCHASTIC) * scale
            tl.store(column_out + base + i * columns, values.to(column_out.dtype.element_ty), mask=mask)


@triton.jit
def weight_amax_kernel(w, amax, count, BLOCK: tl.constexpr):
    """Slots of max |w| over a contiguous tensor of `count` elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = to_float32(tl.load(w + i, mask=i < count, other=0.0))
    store_amax(amax, tl.program_id(0), x)


@triton.jit
def weight_values_kernel(w, amax, out, scales, columns, BLOCK: tl.constexpr):
    """Values of w in 16x16 tiles, and s_dec and amax. A tile serves w and its transpose, so fprop and dgrad alike."""
    first = tl.program_id(0).to(tl.int64) * 16
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < columns
    base = first * columns + n
    encode = stored_scales(amax, scales)
    rows = load_rows(w + base, columns, mask)
    largest = largest_of(rows)
    scale, block_encode = block_scales(tl.max(tl.reshape(largest, (BLOCK // 16, 16)), 1), encode)
    for i in tl.static_range(16):
        blocks = tl.reshape(rows[i], (BLOCK // 16, 16)) * block_encode[:, None]
        values = tl.reshape(e2m1(blocks, largest, False) * scale[:, None], (BLOCK,))
        tl.store(out + base + i * columns, values.to(out.dtype.element_ty), mask=mask)
