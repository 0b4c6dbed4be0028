"""NVFP4 on a GPU: one pass for the amaxes, one pass for the values of both layouts.

A linear layer needs its input (and its output's gradient) twice: in blocks along the features, and rotated in blocks along the
tokens. Both are written from one read. The second is the quantized TRANSPOSE, kept in the layout of x: a BF16 GEMM takes either
operand order, so nothing is transposed in memory.

A program owns 16 rows. Each thread holds the same few columns of all of them, so that the rotation along tokens, the amax of a
block along tokens and its random bytes stay in registers.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    block_scales,
    e2m1_nearest,
    e2m1_stochastic,
    element_words,
    four_rows_of_words,
    hadamard16,
    magnitude_bits,
    random_byte,
    rounded_to,
    tensor_scales,
    to_float32,
)


@triton.jit
def rotated_rows(rows, signs: tl.constexpr, dtype: tl.constexpr):
    """16 rows times diag(sign) / 4 * H16 along the rows, rounded once to `dtype`; bit i of `signs` is set where sign i is -1."""
    scaled = ()
    for i in tl.static_range(16):
        if (signs >> i) & 1:
            scaled = scaled + (rows[i] * -0.25,)
        else:
            scaled = scaled + (rows[i] * 0.25,)
    mixed = hadamard16(scaled)
    rounded = ()
    for i in tl.static_range(16):
        rounded = rounded + (rounded_to(mixed[i], dtype),)
    return rounded


@triton.jit
def quantized(y, random, STOCHASTIC: tl.constexpr):
    """E2M1 value of y clamped to [-6, 6]."""
    y = tl.minimum(tl.maximum(y, -6.0), 6.0)
    if STOCHASTIC:
        return e2m1_stochastic(y, random)
    else:
        return e2m1_nearest(y)


@triton.jit
def amax_kernel(
    x, amax, row_stride, columns, ROW: tl.constexpr, COLUMN: tl.constexpr, SIGNS: tl.constexpr, BLOCK: tl.constexpr
):
    """amax[0] = bits of max |x|, amax[1] = bits of max |rotated x^T|; both start at zero."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    base = x + tl.program_id(0).to(tl.int64) * 16 * row_stride + n
    rows = ()
    for i in tl.static_range(16):
        rows = rows + (to_float32(tl.load(base + i * row_stride, mask=n < columns, other=0.0)),)
    if ROW:
        largest = magnitude_bits(rows[0])
        for i in tl.static_range(1, 16):
            largest = tl.maximum(largest, magnitude_bits(rows[i]))
        tl.atomic_max(amax, tl.max(largest, 0), sem="relaxed")
    if COLUMN:
        rotated = rotated_rows(rows, SIGNS, x.dtype.element_ty)
        largest = magnitude_bits(rotated[0])
        for i in tl.static_range(1, 16):
            largest = tl.maximum(largest, magnitude_bits(rotated[i]))
        tl.atomic_max(amax + 1, tl.max(largest, 0), sem="relaxed")


@triton.jit
def row_values(row, encode, words, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    """Values of one row in blocks of 16 columns; `words` hold a random byte for each element."""
    scale, block_encode = block_scales(tl.max(magnitude_bits(tl.reshape(row, (BLOCK // 16, 16))), 1), encode)
    scale = tl.reshape(tl.broadcast_to(scale[:, None], (BLOCK // 16, 16)), (BLOCK,))
    block_encode = tl.reshape(tl.broadcast_to(block_encode[:, None], (BLOCK // 16, 16)), (BLOCK,))
    random = row
    if STOCHASTIC:
        shifts = 8 * tl.arange(0, 4)[None, :].to(tl.uint32)
        random = tl.reshape((words[:, None] >> shifts) & 0xFF, (BLOCK,))
    return quantized(row * block_encode, random, STOCHASTIC) * scale


@triton.jit
def values_kernel(
    x,
    amax,
    row_out,
    column_out,
    scales,
    rows_total,
    columns,
    row_key,
    column_key,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    ROW_STOCHASTIC: tl.constexpr,
    COLUMN_STOCHASTIC: tl.constexpr,
    SIGNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Values (element * block scale) of x in blocks along columns and of its rotated transpose in blocks along rows; scales = both s_dec."""
    first = tl.program_id(0).to(tl.int64) * 16
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < columns
    base = first * columns + n
    rows = ()
    for i in tl.static_range(16):
        rows = rows + (to_float32(tl.load(x + base + i * columns, mask=mask, other=0.0)),)
    if ROW:
        encode, decode = tensor_scales(tl.load(amax))
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(scales, decode)
        words = rows
        for i in tl.static_range(16):
            if ROW_STOCHASTIC and i % 4 == 0:
                words = four_rows_of_words(row_key, (first + i) * columns + tl.program_id(1) * BLOCK, columns, BLOCK)
            values = row_values(rows[i], encode, words[i % 4], ROW_STOCHASTIC, BLOCK)
            tl.store(row_out + base + i * columns, values.to(row_out.dtype.element_ty), mask=mask)
    if COLUMN:
        encode, decode = tensor_scales(tl.load(amax + 1))
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(scales + 1, decode)
        if SIGNS >= 0:
            rows = rotated_rows(rows, SIGNS, x.dtype.element_ty)
        largest = magnitude_bits(rows[0])
        for i in tl.static_range(1, 16):
            largest = tl.maximum(largest, magnitude_bits(rows[i]))
        scale, block_encode = block_scales(largest, encode)
        words = ()
        if COLUMN_STOCHASTIC:
            words = element_words(column_key, (n.to(tl.int64) * rows_total + first) // 16)
        for i in tl.static_range(16):
            random = largest
            if COLUMN_STOCHASTIC:
                random = random_byte(words, i)
            values = quantized(rows[i] * block_encode, random, COLUMN_STOCHASTIC) * scale
            tl.store(column_out + base + i * columns, values.to(column_out.dtype.element_ty), mask=mask)


@triton.jit
def weight_amax_kernel(w, amax, count, BLOCK: tl.constexpr):
    """amax[0] = bits of max |w| over a contiguous tensor of `count` elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = to_float32(tl.load(w + i, mask=i < count, other=0.0))
    tl.atomic_max(amax, tl.max(magnitude_bits(x), 0), sem="relaxed")


@triton.jit
def weight_values_kernel(w, amax, out, scales, columns, BLOCK: tl.constexpr):
    """Values of w in 16x16 tiles. A tile serves w and its transpose, so one copy serves fprop and dgrad."""
    first = tl.program_id(0).to(tl.int64) * 16
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < columns
    base = first * columns + n
    encode, decode = tensor_scales(tl.load(amax))
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scales, decode)
    rows = ()
    for i in tl.static_range(16):
        rows = rows + (to_float32(tl.load(w + base + i * columns, mask=mask, other=0.0)),)
    largest = magnitude_bits(rows[0])
    for i in tl.static_range(1, 16):
        largest = tl.maximum(largest, magnitude_bits(rows[i]))
    scale, block_encode = block_scales(tl.max(tl.reshape(largest, (BLOCK // 16, 16)), 1), encode)
    for i in tl.static_range(16):
        blocks = tl.reshape(rows[i], (BLOCK // 16, 16)) * block_encode[:, None]
        values = tl.reshape(quantized(blocks, largest, False) * scale[:, None], (BLOCK,))
        tl.store(out + base + i * columns, values.to(out.dtype.element_ty), mask=mask)
