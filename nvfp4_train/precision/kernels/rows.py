"""A few neighbouring rows as a tuple of tensors: each thread holds the same columns of all of them.

What runs down the columns (the rotation along tokens, the largest of a block along tokens) then stays in registers.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import larger, to_float32


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
    for stage in tl.static_range(1, 5 if COUNT == 32 else 4):
        rows = mixed
        mixed = ()
        for i in tl.static_range(COUNT):
            if (i >> stage) & 1 == 0:
                mixed = mixed + (rows[i] + rows[i + (1 << stage)],)
            else:
                mixed = mixed + (rows[i - (1 << stage)] - rows[i],)
    return mixed
