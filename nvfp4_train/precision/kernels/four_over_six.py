"""Four over six on a GPU: of each block's two possible scales the one with the smaller error, in one pass.

The errors of a row of 16 are added left to right, as the reference adds them. A thread holds at most half a row; so it
first adds its half from zero, takes over what the thread before it came to, and adds its half again on top.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    FLOAT_MAX,
    bounded_nearest,
    e2m1_values,
    load_amax,
    reciprocal,
    scaled_magnitude,
    spread,
    tensor_scales,
    to_float32,
)

TOP = tl.constexpr(256.0 * 6.0)


@triton.jit
def divided_by_top(x, NORMAL: tl.constexpr):
    """x / 1536, correctly rounded; NORMAL: neither x nor the quotient can be denormal or overflow."""
    if NORMAL:
        third: tl.constexpr = 0.3333333432674408
        quotient = x * third
        # Markstein: a faithful quotient by 3 and its exact remainder give the nearest one.
        return tl.fma(tl.fma(quotient, -3.0, x), third, quotient) * 0.001953125
    else:
        return tl.div_rn(x, x * 0.0 + 1536.0)


@triton.jit
def eight(x):
    """The eight tensors that make up the last dimension."""
    x = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], 2, 2, 2))
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    a0, a4 = tl.split(x0)
    a2, a6 = tl.split(x2)
    a1, a5 = tl.split(x1)
    a3, a7 = tl.split(x3)
    return a0, a1, a2, a3, a4, a5, a6, a7


@triton.jit
def sum_in_order(x):
    """Sums [R, B] of blocks [R, B, 16] of numbers >= 0, added left to right."""
    parts = eight(tl.reshape(x, (x.shape[0], x.shape[1], 2, 8)))
    half = tl.arange(0, 2)[None, None, :]
    total = parts[0]
    for i in tl.static_range(1, 8):
        total = total + parts[i]
    total = tl.sum(tl.where(half == 0, total, 0.0), 2)[:, :, None] + parts[0]
    for i in tl.static_range(1, 8):
        total = total + parts[i]
    return tl.sum(tl.where(half == 1, total, 0.0), 2)


@triton.jit
def sum_by_halves(x):
    """Sums [B] of the 16 rows of [16, B]: 8 + 8, 4 + 4 and so on."""
    for stage in tl.static_range(4):
        halves = tl.reshape(x, (2, 8 >> stage, x.shape[1]))
        first, second = tl.split(tl.permute(halves, (1, 2, 0)))
        x = first + second
    return tl.reshape(x, (x.shape[1],))


@triton.jit
def candidate(base, decode):
    """(S_b, enc_b) for a block scale before rounding; 0 and 0 where that rounds to nothing."""
    scale = bounded_nearest(base, 3)
    return scale, tl.where(scale > 0, tl.minimum(reciprocal(scale * decode), FLOAT_MAX), 0.0)


@triton.jit
def errors(blocks, scale, encode, amax, MAE: tl.constexpr, NORMAL: tl.constexpr):
    """Error of every element of blocks [R, B, 16] with block scales [R, B], before it is added up."""
    elements = bounded_nearest(scaled_magnitude(blocks, encode[:, :, None]), 1)
    decoded = divided_by_top(elements * scale[:, :, None] * amax, NORMAL)
    difference = decoded - tl.abs(to_float32(blocks))
    if MAE:
        return tl.abs(difference)
    else:
        return difference * difference


@triton.jit
def measured(blocks, scale, encode, amax, MAE: tl.constexpr, NORMAL: tl.constexpr, SQUARE: tl.constexpr):
    """Error of each block, [R, B], or of each square tile, [1, B]."""
    total = sum_in_order(errors(blocks, scale, encode, amax, MAE, NORMAL))
    if SQUARE:
        total = sum_by_halves(total)[None, :]
    return total


@triton.jit
def better_scales(blocks, encode, decode, amax, MAE: tl.constexpr, SQUARE: tl.constexpr):
    """(S_b, enc_b) of blocks [R, B, 16], FP32 [R, B] or [1, B]; `encode` and `decode` are the tensor's scales."""
    largest = tl.max(tl.abs(to_float32(blocks)), 2)
    if SQUARE:
        largest = tl.max(largest, 0)[None, :]
    base = tl.div_rn(largest, largest * 0.0 + 6.0) * encode
    six, encode_six = candidate(base, decode)
    four, encode_four = candidate(base * 1.5, decode)
    if (amax > 8.7e-19) & (amax < 1.2e30):
        error_six = measured(blocks, six, encode_six, amax, MAE, True, SQUARE)
        error_four = measured(blocks, four, encode_four, amax, MAE, True, SQUARE)
    else:
        error_six = measured(blocks, six, encode_six, amax, MAE, False, SQUARE)
        error_four = measured(blocks, four, encode_four, amax, MAE, False, SQUARE)
    better = error_four < error_six
    return tl.where(better, four, six), tl.where(better, encode_four, encode_six)


@triton.jit
def four_over_six_kernel(
    x, amax, out, scales, columns, MAE: tl.constexpr, SQUARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Values of x in blocks of 16 along columns, or in 16x16 tiles, for 16 rows of BLOCK columns; s_dec and amax."""
    amax_bits = load_amax(amax)
    encode, decode = tensor_scales(amax_bits, TOP)
    largest = amax_bits.to(tl.float32, bitcast=True)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scales, decode)
        tl.store(scales + 1, largest)
    group = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    for step in range(16 // ROWS):
        first = group * 16 + step * ROWS
        offset = tl.arange(0, ROWS)[:, None] * columns + n
        tile = tl.load(x + first * columns + offset, mask=n < columns, other=0.0)
        blocks = tl.reshape(tile, (ROWS, BLOCK // 16, 16))
        scale, block_encode = better_scales(blocks, encode, reciprocal(encode), largest, MAE, SQUARE)
        values = e2m1_values(blocks, block_encode[:, :, None], *spread(scale[:, :, None], blocks), blocks, False)
        tl.store(out + first * columns + offset, tl.reshape(values, (ROWS, BLOCK)), mask=n < columns)
