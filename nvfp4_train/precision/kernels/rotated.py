"""The rotated copy of a matrix on a GPU: groups of 16 to 128 along either dimension, fixed or fresh signs.

A line is a row of the operand: a column of x where its rows are contracted, else a row of x. A thread holds a whole
group of a line in its registers, so that no stage of the butterfly needs another thread. `rotation.py` defines it.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    INTERPRETED,
    SIGN,
    SLOTS,
    larger,
    rounded_to,
    store_amax,
    to_float32,
)
from nvfp4_train.precision.kernels.stochastic import philox_rounds

FRESH = tl.constexpr(-2)  # in place of the bits of fixed signs


@triton.jit
def widened(x):
    """FP32 copy of BF16 or FP32 numbers of which a thread has one: `to_float32` takes them in pairs."""
    if INTERPRETED:
        return to_float32(x)
    else:
        return x.to(tl.float32)


@triton.jit
def load_group(x, columns, line, group, mask, AXIS: tl.constexpr, SIZE: tl.constexpr):
    """A group of SIZE numbers of each line, FP32: a tuple of tensors, one for each place in the group."""
    values = ()
    if AXIS == 0:
        base = x + group.to(tl.int64) * SIZE * columns
        for i in tl.static_range(SIZE):
            values = values + (widened(tl.load(base + (i * columns + line), mask=mask, other=0.0)),)
    else:
        base = x + line.to(tl.int64)[:, None] * columns + (group * SIZE + tl.arange(0, 8)[None, :])
        for i in tl.static_range(0, SIZE, 8):
            values = values + apart(to_float32(tl.load(base + i, mask=mask[:, None], other=0.0)))
    return values


@triton.jit
def store_group(out, values, columns, line, group, mask, AXIS: tl.constexpr, SIZE: tl.constexpr):
    """The reverse of `load_group`, for numbers of `out`'s type."""
    if AXIS == 0:
        base = out + group.to(tl.int64) * SIZE * columns
        for i in tl.static_range(SIZE):
            tl.store(base + (i * columns + line), values[i], mask=mask)
    else:
        base = out + line.to(tl.int64)[:, None] * columns + (group * SIZE + tl.arange(0, 8)[None, :])
        for i in tl.static_range(0, SIZE, 8):
            even = tl.join(tl.join(values[i], values[i + 4]), tl.join(values[i + 2], values[i + 6]))
            odd = tl.join(tl.join(values[i + 1], values[i + 5]), tl.join(values[i + 3], values[i + 7]))
            tl.store(base + i, tl.reshape(tl.join(even, odd), (line.shape[0], 8)), mask=mask[:, None])


@triton.jit
def apart(x):
    """The eight columns of [R, 8]."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    a0, a4 = tl.split(x0)
    a2, a6 = tl.split(x2)
    a1, a5 = tl.split(x1)
    a3, a7 = tl.split(x3)
    return a0, a1, a2, a3, a4, a5, a6, a7


@triton.jit
def fresh_signs(key):
    """128 random bits as four words: those of `key` at counter words (0, 0, 1, 0), whose first round is written out."""
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    return philox_rounds(k0, k1, k0, k0 * 0 + 0xCD9E8D57, k1, k1 * 0)


@triton.jit
def rotated_group(values, sign_key, SIGNS: tl.constexpr, STAGES: tl.constexpr, SCALE: tl.constexpr):
    """2^STAGES numbers times diag(sign) * SCALE * H, FP32; Sylvester's H by butterflies in a fixed order.

    Bit i of SIGNS is set where fixed sign i of 16 is -1; FRESH signs are drawn under the key at `sign_key`.
    """
    mixed = ()
    if SIGNS == FRESH:
        words = fresh_signs(tl.load(sign_key))
        scale = (words[0] * 0).to(tl.float32) + SCALE
        for i in tl.static_range(1 << STAGES):
            sign = (words[i // 32] << (31 - i % 32)).to(tl.int32, bitcast=True) & SIGN
            mixed = mixed + (values[i] * (scale.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True),)
    else:
        for i in tl.static_range(1 << STAGES):
            mixed = mixed + (values[i] * ((1 - ((SIGNS >> (i % 16)) & 1) * 2) * SCALE),)
    for stage in tl.static_range(STAGES):
        before = mixed
        mixed = ()
        for i in tl.static_range(1 << STAGES):
            if (i >> stage) & 1 == 0:
                mixed = mixed + (before[i] + before[i + (1 << stage)],)
            else:
                mixed = mixed + (before[i - (1 << stage)] - before[i],)
    return mixed


@triton.jit(do_not_specialize=["sign_key"])
def rotate_kernel(
    x, decode, out, amax, sign_key, lines, groups, columns, AXIS: tl.constexpr, STAGES: tl.constexpr,
    SCALE: tl.constexpr, SIGNS: tl.constexpr, DECODED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotated x, rounded to `out`'s type, and slots of its largest magnitude. SLOTS programs share the groups.

    DECODED: x are values whose tensor scale lies at `decode`. The key of fresh signs lies at `sign_key`.
    """
    SIZE: tl.constexpr = 1 << STAGES
    largest = tl.zeros((BLOCK,), tl.float32)
    across = tl.cdiv(lines, BLOCK)
    tile = tl.program_id(0)
    while tile < groups * across:
        if AXIS == 0:
            block, group = tile % across, tile // across
        else:
            block, group = tile // groups, tile % groups
        line = block * BLOCK + tl.arange(0, BLOCK)
        mask = line < lines
        values = load_group(x, columns, line, group, mask, AXIS, SIZE)
        if DECODED:
            scale, decoded = tl.load(decode), ()
            for i in tl.static_range(SIZE):
                decoded = decoded + (values[i] * scale,)
            values = decoded
        values = rotated_group(values, sign_key, SIGNS, STAGES, SCALE)
        rounded = ()
        for i in tl.static_range(SIZE):
            largest = larger(largest, values[i])
            rounded = rounded + (rounded_to(values[i], out.dtype.element_ty),)
        store_group(out, rounded, columns, line, group, mask, AXIS, SIZE)
        tile += SLOTS
    # Rounding the largest is rounding all: it keeps the order.
    store_amax(amax, to_float32(rounded_to(largest, out.dtype.element_ty)))
