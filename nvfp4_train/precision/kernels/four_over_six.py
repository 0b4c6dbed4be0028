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
    element_nearest,
    encode_scales,
    magnitudes,
    reciprocal,
    signed_product,
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
def candidate(base, decode, NORMAL: tl.constexpr):
    """(S_b, enc_b) for a block scale before rounding; a scale of 0 makes 0 of every element.

    NORMAL: the scale is at most 384, and a block that has none is encoded by that of 2^-10, which no element overflows.
    """
    if NORMAL:
        scale = element_nearest(base, 3)
        return scale, reciprocal(tl.maximum(scale, 0.0009765625) * decode)
    else:
        scale = bounded_nearest(base, 3)
        return scale, encode_scales(scale, decode)


@triton.jit
def slope_and_rest(scale, amax):
    """What elements are multiplied by to decode them, and what their powers of two are."""
    part = amax * 0.001953125  # 1536 is 3 * 2^9
    one, more = divided_by_three(scale * part), divided_by_three(scale * 1.5 * part)
    slope = (more - one) * 2.0
    return slope, one - slope


@triton.jit
def elements_of(magnitude, encode, BOUND: tl.constexpr):
    """Elements of magnitudes [N, 8], at most 6. Without BOUND none is 7 or more before it is rounded."""
    y = magnitude * encode[:, None]
    if BOUND:
        return bounded_nearest(y, 1)
    else:
        return element_nearest(y, 1)


@triton.jit
def errors(magnitude, elements, scale, amax, MAE: tl.constexpr, NORMAL: tl.constexpr):
    """Error of every one of [N, 8], before it is added up."""
    if NORMAL:
        slope, rest = slope_and_rest(scale, amax)
        power = (elements.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
        decoded = tl.fma(elements, slope[:, None], power * rest[:, None])
    else:
        decoded = elements * scale[:, None] * amax[:, None]
        decoded = tl.div_rn(decoded, decoded * 0.0 + 1536.0)
    difference = decoded - magnitude
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
def measured(
    magnitudes, scale, encode, amax, MAE: tl.constexpr, NORMAL: tl.constexpr, SQUARE: tl.constexpr, BOUND: tl.constexpr
):
    """(error, elements) of each block, or of each square tile, with this scale; elements as two tensors [N, 8]."""
    left = elements_of(magnitudes[0], encode, BOUND)
    right = elements_of(magnitudes[1], encode, BOUND)
    total = added_in_order(scale * 0.0, errors(magnitudes[0], left, scale, amax, MAE, NORMAL))
    total = added_in_order(total, errors(magnitudes[1], right, scale, amax, MAE, NORMAL))
    if SQUARE:
        total = for_each_row(sum_by_halves(tl.reshape(total, (16, total.shape[0] // 16))))
    return total, left, right


@triton.jit
def better(blocks, largest, encode, amax, MAE: tl.constexpr, NORMAL: tl.constexpr, SQUARE: tl.constexpr):
    """Values of the first and of the second halves with the better of two scales.

    The scale that makes 4 of the largest can leave it as 6, a denormal one being at least two thirds of what it was
    before rounding; the one that makes 6 of it can leave it as 9.
    """
    if NORMAL:
        base = divided_by_three(largest) * (encode * 0.5)
    else:
        base = tl.div_rn(largest, largest * 0.0 + 6.0) * encode
    decode = tl.div_rn(1.0, encode)
    six, encode_six = candidate(base, decode, NORMAL)
    four, encode_four = candidate(base * 1.5, decode, NORMAL)
    x = magnitudes(blocks[0]), magnitudes(blocks[1])
    error_six, left_six, right_six = measured(x, six, encode_six, amax, MAE, NORMAL, SQUARE, True)
    error_four, left_four, right_four = measured(x, four, encode_four, amax, MAE, NORMAL, SQUARE, not NORMAL)
    choice = error_four < error_six
    scale = tl.where(choice, four, six).to(tl.bfloat16)
    scale = tl.broadcast_to(scale[:, None], blocks[0].shape)
    left = tl.where(choice[:, None], left_four, left_six)
    right = tl.where(choice[:, None], right_four, right_six)
    return signed_product(left, blocks[0], scale), signed_product(right, blocks[1], scale)


@triton.jit
def ordinary(amax):
    """Whether nothing that a tensor with this amax decodes to overflows or, but for block scales of 0, is denormal.

    Nor is a product of a block scale and the tensor's decode scale, which is at least 8.7e-19.
    """
    return (amax > 1.4e-15) & (amax < 1.2e30)


@triton.jit
def better_values(blocks, encode, amax, normal, MAE: tl.constexpr, SQUARE: tl.constexpr):
    """Values (element * block scale) [N, 8] twice, BF16, of blocks as `rows.load_blocks` gives them.

    `encode` and `amax` are the tensor's scale and largest, or each row's, [N]; `normal` says whether they all are
    `ordinary`. SQUARE: the blocks are the 16 rows, one after the other, of tiles side by side.
    """
    largest = largest_across(blocks)
    amax = tl.zeros_like(largest) + amax
    if SQUARE:
        largest = for_each_row(tl.max(tl.reshape(largest, (16, largest.shape[0] // 16)), 0))
    if normal:
        left, right = better(blocks, largest, encode, amax, MAE, True, SQUARE)
    else:
        left, right = better(blocks, largest, encode, amax, MAE, False, SQUARE)
    return left, right
