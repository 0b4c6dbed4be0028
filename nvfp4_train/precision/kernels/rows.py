"""What a thread holds, so that what belongs together stays in its registers.

Of neighbouring rows, as a tuple of tensors, each thread holds the same columns: the rotation along tokens, and the
largest of a block along tokens, run down them. Along a row a thread holds eights, which it reads and writes at once.
Where neighbours among its threads hold neighbouring eights, a warp writes whole sectors of memory; where random words
or a sum in a fixed order belong to a block of 16, a thread has both eights of it, as two tensors, and writes halves.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import larger, magnitude_bits, to_float32


@triton.jit
def load_rows(base, columns, n, mask, COUNT: tl.constexpr):
    """`COUNT` rows from `base` on, at columns n; zeros where masked."""
    rows = ()
    for i in tl.static_range(COUNT):
        rows = rows + (tl.load(base + (i * columns + n), mask=mask, other=0.0),)
    return rows


@triton.jit
def largest_of(rows, COUNT: tl.constexpr):
    """Largest magnitude of the rows, column by column, FP32; NaN where one is."""
    largest = larger(rows[0], rows[1])
    for i in tl.static_range(2, COUNT):
        largest = larger(largest, rows[i])
    return tl.abs(to_float32(largest))


@triton.jit
def load_blocks(base, offset, mask):
    """16 elements from each offset on: the first eight [N, 8], and the others; zeros where masked."""
    offset = offset[:, None] + tl.arange(0, 8)[None, :]
    return (
        tl.load(base + offset, mask=mask[:, None], other=0.0),
        tl.load(base + (offset + 8), mask=mask[:, None], other=0.0),
    )


@triton.jit
def store_half_blocks(base, offset, mask, HALF: tl.constexpr, values):
    """Store [N, 8] where `load_blocks` had read its first (HALF 0) or second tensor."""
    offset = offset[:, None] + tl.arange(0, 8)[None, :]
    tl.store(base + (offset + 8 * HALF), values, mask=mask[:, None])


@triton.jit
def largest_across(blocks):
    """Largest magnitude of each block that `load_blocks` gave, FP32 [N]; NaN where one is."""
    return largest_of_eight(larger(blocks[0], blocks[1]))


@triton.jit
def largest_of_eight(largest):
    """Largest magnitude of each row of [N, 8], FP32 [N]; NaN where one is."""
    for stage in tl.static_range(2):
        halves = tl.reshape(largest, (largest.shape[0], 2, 4 >> stage))
        first, second = tl.split(tl.permute(halves, (0, 2, 1)))
        largest = larger(first, second)
    first, second = tl.split(to_float32(largest))
    return larger(first, second)


@triton.jit
def blocks_across(columns, block, FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(row, number, mask) of the blocks of 16 of ROWS rows, in BLOCK columns from block number `block` on; [N]."""
    i = tl.arange(0, ROWS * (BLOCK // 16))
    number = block + i % (BLOCK // 16)
    return i // (BLOCK // 16), number, (number < columns // 16) | FULL


@triton.jit
def eights_across(columns, block, FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(offsets, mask) of the eights of ROWS rows, in BLOCK columns from block of 16 number `block` on; [N, 8]."""
    i = tl.arange(0, ROWS * (BLOCK // 8))
    number = block * 2 + i % (BLOCK // 8)
    mask = (number < columns // 8) | FULL
    return (i // (BLOCK // 8) * columns + number * 8)[:, None] + tl.arange(0, 8)[None, :], mask[:, None]


@triton.jit
def largest_of_eights(eights, COUNT: tl.constexpr):
    """Bits of the largest magnitude of every COUNT rows of [N, 8], int32 [N / COUNT]."""
    bits = magnitude_bits(largest_of_eight(eights))
    return tl.max(tl.reshape(bits, (bits.shape[0] // COUNT, COUNT)), 1)


@triton.jit
def for_each_eight(scale, eights, COUNT: tl.constexpr):
    """Scales of blocks of COUNT eights for their elements [N, 8]."""
    return tl.reshape(tl.broadcast_to(scale[:, None, None], (scale.shape[0], COUNT, 8)), eights.shape)


@triton.jit
def rotated_rows(rows, signs: tl.constexpr, COUNT: tl.constexpr):
    """16 or 32 rows times diag(sign) / sqrt(COUNT) * H along the rows, FP32.

    Bit i of `signs` is set where sign i is -1. Sylvester's H by butterflies in a fixed order. A quarter of a BF16 value
    is exact, so that the first sums of 16 rows may take it in.
    """
    SCALE: tl.constexpr = 0.25 if COUNT == 16 else 0.17677669529663687
    mixed = ()
    for i in tl.static_range(0, COUNT, 2):
        a, b = to_float32(rows[i]), to_float32(rows[i + 1])
        a = a * ((1 - ((signs >> i) & 1) * 2) * SCALE)
        if COUNT == 16 and rows[0].dtype == tl.bfloat16:
            total = tl.fma(b, (1 - ((signs >> (i + 1)) & 1) * 2) * SCALE, a)
            difference = tl.fma(b, (((signs >> (i + 1)) & 1) * 2 - 1) * SCALE, a)
        else:
            b = b * ((1 - ((signs >> (i + 1)) & 1) * 2) * SCALE)
            total, difference = a + b, a - b
        mixed = mixed + (total, difference)
    return butterflies(mixed, 1, 5 if COUNT == 32 else 4)


@triton.jit
def butterflies(values, FIRST: tl.constexpr, END: tl.constexpr):
    """Stages FIRST to END - 1 of Sylvester's H over 2^END tensors, without its scale."""
    mixed = values
    for stage in tl.static_range(FIRST, END):
        before = mixed
        mixed = ()
        for i in tl.static_range(1 << END):
            if (i >> stage) & 1 == 0:
                mixed = mixed + (before[i] + before[i + (1 << stage)],)
            else:
                mixed = mixed + (before[i - (1 << stage)] - before[i],)
    return mixed


@triton.jit
def eight_apart(x):
    """The eight tensors of x [..., 2, 2, 2], in the order of its last three dimensions."""
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    a0, a4 = tl.split(x0)
    a2, a6 = tl.split(x2)
    a1, a5 = tl.split(x1)
    a3, a7 = tl.split(x3)
    return a0, a1, a2, a3, a4, a5, a6, a7
