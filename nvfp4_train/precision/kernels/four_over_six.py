"""Four over six on a GPU: of each block's two possible scales the one with the smaller error.

The errors of a row of 16 are added left to right, as the reference adds them; a thread holds all of them.

What an element decodes to, fl(fl(element * S * amax) / 1536), need not be divided for each of them: for 2^k times 1 or
1.5 it is 2^k times what 1 or 1.5 decode to. With the difference of these two as a slope, a product and a sum give both,
exactly.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    EXPONENT,
    bounded_nearest,
    encode_scales,
    scaled_magnitude,
    to_float32,
)
from nvfp4_train.precision.kernels.rows import largest_across

TOP = tl.constexpr(256.0 * 6.0)
MSE, MAE = tl.constexpr(1), tl.constexpr(2)
MEASURES = {None: 0, "mse": MSE.value, "mae": MAE.value}  # how kernels are told `QuantSpec.four_over_six`


@triton.jit
def divided_by_three(x):
    """x / 3, correctly rounded, where that is not denormal."""
    third: tl.constexpr = 0.3333333432674408
    quotient = x * third
    # Markstein: a faithful quotient by 3 and its exact remainder give the nearest one.
    return tl.fma(tl.fma(quotient, -3.0, x), third, quotient)


@triton.jit
def divided_by_top(x, NORMAL: tl.constexpr):
    """x / 1536, correctly rounded; NORMAL: neither x nor the quotient can be denormal or overflow."""
    if NORMAL:
        return divided_by_three(x) * 0.001953125
    else:
        return tl.div_rn(x, x * 0.0 + 1536.0)


@triton.jit
def sixth_of(largest, NORMAL: tl.constexpr):
    """Largest magnitudes of blocks / 6; NORMAL: one that is small enough to be denormal has a block scale of 0."""
    if NORMAL:
        return divided_by_three(largest) * 0.5
    else:
        return tl.div_rn(largest, largest * 0.0 + 6.0)


@triton.jit
def candidate(base, decode):
    """(S_b, enc_b) for a block scale before rounding; 0 and 0 where that rounds to nothing."""
    scale = bounded_nearest(base, 3)
    return scale, encode_scales(scale, decode)


@triton.jit
def slope_and_rest(scale, amax):
    """What elements are multiplied by to decode them, and what their powers of two are."""
    one, more = divided_by_top(scale * amax, True), divided_by_top(scale * 1.5 * amax, True)
    return (more - one) * 2.0, tl.fma(one, 3.0, more * -2.0)


@triton.jit
def errors(x, elements, scale, slope, rest, amax, MAE: tl.constexpr, NORMAL: tl.constexpr):
    """Error of every one of x [N, 8], before it is added up."""
    if NORMAL:
        power = (elements.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
        decoded = tl.fma(elements, slope[:, None], power * rest[:, None])
    else:
        decoded = divided_by_top(elements * scale[:, None] * amax[:, None], False)
    difference = decoded - tl.abs(to_float32(x))
    if MAE:
        return tl.abs(difference)
    else:
        return difference * difference


@triton.jit
def halves(x):
    """The first and the second half of the last dimension of [N, 2 K]."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def added_in_order(total, x):
    """total [N] plus the numbers of [N, 8], one after the other."""
    for first in tl.static_range(2):
        x0, x1 = tl.split(halves(halves(x)[first])[0])
        x2, x3 = tl.split(halves(halves(x)[first])[1])
        total = total + x0 + x1 + x2 + x3
    return total


@triton.jit
def sum_by_halves(x):
    """Sums [B] of the 16 rows of [16, B]: 8 + 8, 4 + 4 and so on."""
    for stage in tl.static_range(4):
        parts = tl.reshape(x, (2, 8 >> stage, x.shape[1]))
        first, second = tl.split(tl.permute(parts, (1, 2, 0)))
        x = first + second
    return tl.reshape(x, (x.shape[1],))


@triton.jit
def for_each_row(x):
    """Numbers [B] of square tiles for their 16 rows, [16 B]."""
    return tl.reshape(tl.broadcast_to(x[None, :], (16, x.shape[0])), (16 * x.shape[0],))


@triton.jit
def measured(blocks, scale, encode, amax, MAE: tl.constexpr, NORMAL: tl.constexpr, SQUARE: tl.constexpr):
    """(error, elements) of each block, or of each square tile, with this scale; elements as two tensors [N, 8]."""
    slope, rest = slope_and_rest(scale, amax)
    left = bounded_nearest(scaled_magnitude(blocks[0], tl.broadcast_to(encode[:, None], blocks[0].shape)), 1)
    right = bounded_nearest(scaled_magnitude(blocks[1], tl.broadcast_to(encode[:, None], blocks[1].shape)), 1)
    total = added_in_order(scale * 0.0, errors(blocks[0], left, scale, slope, rest, amax, MAE, NORMAL))
    total = added_in_order(total, errors(blocks[1], right, scale, slope, rest, amax, MAE, NORMAL))
    if SQUARE:
        total = for_each_row(sum_by_halves(tl.reshape(total, (16, total.shape[0] // 16))))
    return total, left, right


@triton.jit
def better(blocks, largest, encode, amax, MAE: tl.constexpr, NORMAL: tl.constexpr, SQUARE: tl.constexpr):
    """(S_b, elements of the first halves, of the second halves) of the better of two scales."""
    base = sixth_of(largest, NORMAL) * encode
    decode = tl.div_rn(1.0, encode)
    six, encode_six = candidate(base, decode)
    four, encode_four = candidate(base * 1.5, decode)
    error_six, left_six, right_six = measured(blocks, six, encode_six, amax, MAE, NORMAL, SQUARE)
    error_four, left_four, right_four = measured(blocks, four, encode_four, amax, MAE, NORMAL, SQUARE)
    choice = error_four < error_six
    left = tl.where(choice[:, None], left_four, left_six)
    right = tl.where(choice[:, None], right_four, right_six)
    return tl.where(choice, four, six), left, right


@triton.jit
def ordinary(amax):
    """Whether nothing that a tensor with this amax decodes to overflows or, but for block scales of 0, is denormal."""
    return (amax > 8.7e-19) & (amax < 1.2e30)


@triton.jit
def better_elements(blocks, encode, amax, normal, MAE: tl.constexpr, SQUARE: tl.constexpr):
    """(S_b [N], magnitudes of the elements [N, 8] twice) of blocks as `rows.load_blocks` gives them.

    `encode` and `amax` are the tensor's scale and largest, or each row's, [N]; `normal` says whether they all are
    `ordinary`. SQUARE: the blocks are the 16 rows, one after the other, of tiles side by side.
    """
    largest = largest_across(blocks)
    amax = tl.zeros_like(largest) + amax
    if SQUARE:
        largest = for_each_row(tl.max(tl.reshape(largest, (16, largest.shape[0] // 16)), 0))
    if normal:
        scale, left, right = better(blocks, largest, encode, amax, MAE, True, SQUARE)
    else:
        scale, left, right = better(blocks, largest, encode, amax, MAE, False, SQUARE)
    return scale, left, right
