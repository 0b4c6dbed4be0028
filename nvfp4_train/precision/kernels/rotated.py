"""The rotated copy of a matrix on a GPU: groups of 16 to 128 along either dimension, fixed or fresh signs.

A line is a row of the operand: a column of x where its rows are contracted, else a row of x. A group is cut into eight
parts of neighbours. Along a part the butterfly runs over a tuple, in registers; its last three stages run over the
parts, three dimensions of two, which threads of one warp share. `rotation.py` defines the rotation.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    SIGN,
    SLOTS,
    larger,
    magnitude_bits,
    rounded_to,
    to_float32,
)
from nvfp4_train.precision.kernels.rows import butterflies, eight_apart
from nvfp4_train.precision.kernels.stochastic import philox_rounds

FRESH = tl.constexpr(-2)  # in place of the bits of fixed signs


@triton.jit
def part_number():
    """0 to 7 of eight parts, [2, 2, 2, 1]."""
    i = tl.arange(0, 2)
    return i[:, None, None, None] * 4 + i[None, :, None, None] * 2 + i[None, None, :, None]


@triton.jit
def load_group(x, columns, line, group, AXIS: tl.constexpr, SIZE: tl.constexpr):
    """A group of SIZE numbers of each line, FP32: of each place in a part a tensor [2, 2, 2, lines]."""
    PART: tl.constexpr = SIZE // 8
    first = (group * SIZE + part_number() * PART).to(tl.int64)
    values = ()
    if AXIS == 0 or PART < 8:
        step = columns if AXIS == 0 else 1
        base = x + (first * columns + line if AXIS == 0 else line.to(tl.int64) * columns + first)
        for i in tl.static_range(PART):
            values = values + (to_float32(tl.load(base + i * step)),)
    else:
        base = x + (line.to(tl.int64) * columns + first)[:, :, :, :, None] + tl.arange(0, 8)
        for i in tl.static_range(0, PART, 8):
            eight = to_float32(tl.load(base + i))
            values = values + eight_apart(tl.reshape(eight, (2, 2, 2, line.shape[3], 2, 2, 2)))
    return values


@triton.jit
def store_group(out, values, columns, line, group, AXIS: tl.constexpr, SIZE: tl.constexpr):
    """The reverse of `load_group`, for numbers of `out`'s type."""
    PART: tl.constexpr = SIZE // 8
    first = (group * SIZE + part_number() * PART).to(tl.int64)
    if AXIS == 0 or PART < 8:
        step = columns if AXIS == 0 else 1
        base = out + (first * columns + line if AXIS == 0 else line.to(tl.int64) * columns + first)
        for i in tl.static_range(PART):
            tl.store(base + i * step, values[i])
    else:
        base = out + (line.to(tl.int64) * columns + first)[:, :, :, :, None] + tl.arange(0, 8)
        for i in tl.static_range(0, PART, 8):
            even = tl.join(tl.join(values[i], values[i + 4]), tl.join(values[i + 2], values[i + 6]))
            odd = tl.join(tl.join(values[i + 1], values[i + 5]), tl.join(values[i + 3], values[i + 7]))
            tl.store(base + i, tl.reshape(tl.join(even, odd), (2, 2, 2, line.shape[3], 8)))


@triton.jit
def sign_words(sign_key, SIGNS: tl.constexpr):
    """Signs of a group as the bits of four words, 1 for minus: SIGNS repeated, or if FRESH those of the key
    at `sign_key`, at counter words (0, 0, 1, 0), whose first round is written out.
    """
    if SIGNS == FRESH:
        key = tl.load(sign_key)
        k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
        return philox_rounds(k0, k1, k0, k0 * 0 + 0xCD9E8D57, k1, k1 * 0)
    else:
        word = tl.full((), SIGNS * 65537, tl.uint32)
        return word, word, word, word


@triton.jit
def across_parts(x, AXIS: tl.constexpr):
    """The butterfly's stage that runs over one of the dimensions of parts: the first half adds the second to itself,
    which is subtracted from the first.
    """
    own = x.to(tl.int32, bitcast=True)
    other = tl.xor_sum(own, AXIS, keep_dims=True) ^ own
    second = (part_number() >> (2 - AXIS)) & 1
    return other.to(tl.float32, bitcast=True) + (own ^ (second << 31)).to(tl.float32, bitcast=True)


@triton.jit
def rotated_group(values, words, STAGES: tl.constexpr, SCALE: tl.constexpr):
    """2^STAGES numbers times diag(sign) * SCALE * H, FP32; Sylvester's H by butterflies in a fixed order."""
    PART: tl.constexpr = 1 << (STAGES - 3)
    first = part_number() * PART
    word = tl.where(first < 64, tl.where(first < 32, words[0], words[1]), tl.where(first < 96, words[2], words[3]))
    word = word >> (first % 32).to(tl.uint32)
    scale = ((first * 0).to(tl.float32) + SCALE).to(tl.int32, bitcast=True)
    mixed = ()
    for i in tl.static_range(PART):
        sign = (word << (31 - i)).to(tl.int32, bitcast=True) & SIGN
        mixed = mixed + (values[i] * (scale | sign).to(tl.float32, bitcast=True),)
    mixed = butterflies(mixed, 0, STAGES - 3)
    met = ()
    for i in tl.static_range(PART):
        met = met + (across_parts(across_parts(across_parts(mixed[i], 2), 1), 0),)
    return met


@triton.jit(do_not_specialize=["sign_key"])
def rotate_kernel(
    x, decode, out, amax, sign_key, lines, groups, columns, AXIS: tl.constexpr, STAGES: tl.constexpr,
    SCALE: tl.constexpr, SIGNS: tl.constexpr, DECODED: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotated x, rounded to `out`'s type; its largest magnitude goes into the slots `amax`, which begin with zeros.

    DECODED: x are values whose tensor scale lies at `decode`. The key of fresh signs lies at `sign_key`. RAGGED: the
    last program has less than BLOCK lines.
    """
    SIZE: tl.constexpr = 1 << STAGES
    if AXIS == 0:
        across = tl.cdiv(lines, BLOCK)
        block, group = tl.program_id(0) % across, tl.program_id(0) // across
    else:
        block, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    line = block * BLOCK + tl.arange(0, BLOCK)[None, None, None, :]
    if RAGGED:  # the last line more than once, rather than a mask for every number
        line = tl.minimum(line, lines - 1)
    values = load_group(x, columns, line, group, AXIS, SIZE)
    if DECODED:
        scale, decoded = tl.load(decode), ()
        for i in tl.static_range(SIZE // 8):
            decoded = decoded + (values[i] * scale,)
        values = decoded
    values = rotated_group(values, sign_words(sign_key, SIGNS), STAGES, SCALE)
    largest, rounded = values[0], ()
    for i in tl.static_range(SIZE // 8):
        largest = larger(largest, values[i])
        rounded = rounded + (rounded_to(values[i], out.dtype.element_ty),)
    store_group(out, rounded, columns, line, group, AXIS, SIZE)
    # Rounding the largest is rounding all: it keeps the order.
    bits = magnitude_bits(to_float32(rounded_to(largest, out.dtype.element_ty)))
    tl.atomic_max(amax + tl.program_id(0) % SLOTS, tl.max(tl.ravel(bits), 0), sem="relaxed")
