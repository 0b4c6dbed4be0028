"""Quartet II's backward operand on a GPU, from its rotated copy: block scales corrected by group, nearest elements.

`precision/eden.py` is the definition. Elements of a block are added in its order, blocks by halves.
"""

import triton
import triton.language as tl

from nvfp4_train.precision import eden
from nvfp4_train.precision.kernels.device import (
    EXPONENT,
    bounded_nearest,
    leading_power,
    load_amax,
    to_bfloat16,
    to_float32,
    with_sign,
)
from nvfp4_train.precision.kernels.rows import eight_apart, largest_of, load_rows
from nvfp4_train.precision.kernels.stochastic import element_words, place

V, TOP = tl.constexpr(eden.V), tl.constexpr(eden.TOP)


@triton.jit
def sum_in_order(x):
    """Sums [R, B] of blocks [R, B, 16] of numbers >= 0, added left to right.

    A thread holds at most half a row; so it first adds its half from zero, takes over what the thread before it came
    to, and adds its half again on top.
    """
    parts = eight_apart(tl.reshape(x, (x.shape[0], x.shape[1], 2, 2, 2, 2)))
    half = tl.arange(0, 2)[None, None, :]
    total = parts[0]
    for i in tl.static_range(1, 8):
        total = total + parts[i]
    total = tl.sum(tl.where(half == 0, total, 0.0), 2)[:, :, None] + parts[0]
    for i in tl.static_range(1, 8):
        total = total + parts[i]
    return tl.sum(tl.where(half == 1, total, 0.0), 2)


@triton.jit
def stored_scale(amax, scales):
    """s_dec of a tensor from its amax slots, 1 where there is none; one program writes it, NaN for it where amax is not
    finite, and amax to `scales`.
    """
    bits = load_amax(amax)
    largest = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, largest * 0.0 + TOP)
    scale = tl.where((bits < EXPONENT) & (scale > 0), scale, 1.0)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scales, tl.where(bits < EXPONENT, scale, float("nan")))
        tl.store(scales + 1, largest)
    return scale


@triton.jit
def uncorrected(largest, s_dec):
    """(S_b, what x is divided by) of blocks with these amaxes."""
    scale = bounded_nearest(tl.div_rn(tl.div_rn(largest, largest * 0.0 + V), s_dec), 3)
    scale = tl.where(scale == 0.0, 1.0, scale)
    # At least the smallest number: as integers positive numbers have the same order.
    return scale, tl.maximum((scale * s_dec).to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)


@triton.jit
def by_halves(x):
    """Sums over the last dimension, 8, of [A, B, 8]: 4 + 4, 2 + 2, 1 + 1."""
    first, second = tl.split(tl.permute(tl.reshape(x, (x.shape[0], x.shape[1], 2, 4)), (0, 1, 3, 2)))
    x = first + second
    first, second = tl.split(tl.permute(tl.reshape(x, (x.shape[0], x.shape[1], 2, 2)), (0, 1, 3, 2)))
    first, second = tl.split(first + second)
    return first + second


@triton.jit
def corrected(scale, squares, products, words):
    """Block scales [A, B, 8] of groups of eight, corrected and rounded by a random byte each."""
    product = by_halves(products)
    factor = tl.where(product == 0.0, 1.0, tl.div_rn(by_halves(squares), product))
    word, byte = tl.broadcast(tl.join(words[0], words[1])[:, :, :, None], tl.arange(0, 4)[None, None, None, :])
    byte = (tl.reshape(word, scale.shape) >> (8 * tl.reshape(byte, scale.shape)).to(tl.uint32)) & 0xFF
    return e4m3_stochastic(scale * factor[:, :, None], byte)


@triton.jit
def e4m3_stochastic(magnitude, byte):
    """Neighbour of y >= 0 among E4M3 numbers, 448 beyond: floor(y / d + (r + .5) / 256) * d."""
    magnitude = tl.minimum(magnitude, 448.0)
    distance = leading_power(magnitude, 3) * 0.125
    inverse = (0x7F000000 - distance.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # of a power of two
    return tl.floor(magnitude * inverse + (byte.to(tl.float32) + 0.5) * 0.00390625) * distance


@triton.jit
def group_words(key, line, group, whole_width):
    """Two words for a group's eight block scales, which are counted along the lines: half a call of random bits."""
    half = line * (whole_width // 128) + group
    words = element_words(key, half >> 1)
    second = (half & 1) == 1
    return tl.where(second, words[2], words[0]), tl.where(second, words[3], words[1])


@triton.jit
def quotient(x, divisor):
    """y = |x| / divisor and the nearest E2M1 magnitude."""
    y = tl.div_rn(tl.abs(to_float32(x)), divisor)
    return y, bounded_nearest(y, 1)


@triton.jit(do_not_specialize=["key"])
def along_rows_kernel(
    x, amax, out, scales, row_blocks, column_blocks, key, columns, whole_rows, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Values (element * block scale, BF16) of rotated x in blocks along its rows: 128 rows of BLOCK columns.

    `scales` takes s_dec and amax. The key of random bits lies at `key`. Where x is a part of a matrix (SPLIT), the
    tables say where its blocks of 16 rows and columns lie in the whole.
    """
    group = tl.num_programs(0) - 1 - tl.program_id(0)  # the last groups were written last, and are in the L2 cache
    s_dec = stored_scale(amax, scales)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = n[:, None]
    mask = column < columns
    base = group.to(tl.int64) * 128 * columns + (tl.arange(0, 8)[None, :] * 16).to(tl.int64) * columns
    rows = load_rows(x + base, columns, column, mask, 16)
    scale, divisor = uncorrected(largest_of(rows, 16), s_dec)
    squares = scale * 0.0
    products, elements = squares, ()
    for i in tl.static_range(16):
        y, element = quotient(rows[i], divisor)
        squares += y * y
        products += y * element
        elements = elements + (with_sign(element, to_float32(rows[i])),)
    line = place(column_blocks, n // 16, n < columns, SPLIT) * 16 + n % 16
    whole_group = place(row_blocks, group * 8, True, SPLIT) // 8
    words = group_words(tl.load(key), line[:, None], whole_group, whole_rows)
    groups: tl.constexpr = (BLOCK, 1, 8)
    squares, products, scale = tl.reshape(squares, groups), tl.reshape(products, groups), tl.reshape(scale, groups)
    scale = tl.reshape(corrected(scale, squares, products, words), (BLOCK, 8))
    for i in tl.static_range(16):
        tl.store(out + base + (i * columns + column), to_bfloat16(elements[i] * scale), mask=mask)


@triton.jit(do_not_specialize=["key"])
def along_columns_kernel(
    x, amax, out, scales, row_blocks, column_blocks, key, columns, whole_columns, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same in blocks along its columns: ROWS rows of BLOCK columns."""
    s_dec = stored_scale(amax, scales)
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    offset = row.to(tl.int64)[:, None] * columns + n
    blocks = tl.reshape(tl.load(x + offset, mask=n < columns, other=0.0), (ROWS, BLOCK // 16, 16))
    scale, divisor = uncorrected(tl.max(tl.abs(to_float32(blocks)), 2), s_dec)
    y, element = quotient(blocks, divisor[:, :, None])
    squares, products = sum_in_order(y * y), sum_in_order(y * element)
    line = place(row_blocks, row // 16, row >= 0, SPLIT) * 16 + row % 16
    group = tl.program_id(1) * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
    group = place(column_blocks, group * 8, group < columns // 128, SPLIT) // 8
    words = group_words(tl.load(key), line[:, None], group[None, :], whole_columns)
    groups: tl.constexpr = (ROWS, BLOCK // 128, 8)
    squares, products, scale = tl.reshape(squares, groups), tl.reshape(products, groups), tl.reshape(scale, groups)
    scale = tl.reshape(corrected(scale, squares, products, words), (ROWS, BLOCK // 16))
    values = to_bfloat16(with_sign(element, to_float32(blocks)) * scale[:, :, None])
    tl.store(out + offset, tl.reshape(values, (ROWS, BLOCK)), mask=n < columns)
