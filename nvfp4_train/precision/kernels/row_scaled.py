"""NVFP4 with a tensor scale for each row (token) on a GPU, four over six among it: blocks along the columns, nearest.

One pass leaves the amax of each row, so that ranks that share the columns can take the largest, a second the values.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels import four_over_six
from nvfp4_train.precision.kernels.device import (
    block_scales,
    e2m1_values,
    larger,
    magnitude_bits,
    reciprocal,
    spread,
    tensor_scales,
    to_float32,
)

# Rows that a program takes at a time.
ROWS = tl.constexpr(4)


@triton.jit
def row_amax_kernel(x, amax, columns, BLOCK: tl.constexpr):
    """Bits of the largest magnitude of each row of x, int32; a program takes ROWS of them."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    base = x + row.to(tl.int64)[:, None] * columns
    largest = tl.zeros((ROWS, BLOCK), tl.float32)
    first = 0
    while first < columns:
        n = first + tl.arange(0, BLOCK)[None, :]
        largest = larger(largest, to_float32(tl.load(base + n, mask=n < columns, other=0.0)))
        first += BLOCK
    tl.store(amax + row, tl.max(magnitude_bits(largest), 1))


@triton.jit
def better_scales(blocks, encode, decode, amax, MAE: tl.constexpr):
    """`four_over_six.better_scales` for rows with scales of their own: encode, decode and amax are [R, 1]."""
    largest = tl.max(tl.abs(to_float32(blocks)), 2)
    base = tl.div_rn(largest, largest * 0.0 + 6.0) * encode
    six, encode_six = four_over_six.candidate(base, decode)
    four, encode_four = four_over_six.candidate(base * 1.5, decode)
    wide = tl.reshape(amax, (amax.shape[0], 1, 1))
    if (tl.min(tl.min(amax, 1), 0) > 8.7e-19) & (tl.max(tl.max(amax, 1), 0) < 1.2e30):
        error_six = four_over_six.measured(blocks, six, encode_six, wide, MAE, True, False)
        error_four = four_over_six.measured(blocks, four, encode_four, wide, MAE, True, False)
    else:
        error_six = four_over_six.measured(blocks, six, encode_six, wide, MAE, False, False)
        error_four = four_over_six.measured(blocks, four, encode_four, wide, MAE, False, False)
    better = error_four < error_six
    return tl.where(better, four, six), tl.where(better, encode_four, encode_six)


@triton.jit
def row_scaled_kernel(
    x, amax, out, scales, columns, FOUR_OVER_SIX: tl.constexpr, MAE: tl.constexpr, BLOCK: tl.constexpr
):
    """Values (element * block scale, BF16) of x; `scales` takes s_dec of each row."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    bits = tl.load(amax + row)
    encode, decode = tensor_scales(bits, four_over_six.TOP if FOUR_OVER_SIX else 2688.0)
    if tl.program_id(1) == 0:
        tl.store(scales + row, decode)
    encode = encode[:, None]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    offset = row.to(tl.int64)[:, None] * columns + n
    blocks = tl.reshape(tl.load(x + offset, mask=n < columns, other=0.0), (ROWS, BLOCK // 16, 16))
    if FOUR_OVER_SIX:
        largest = bits.to(tl.float32, bitcast=True)[:, None]
        scale, block_encode = better_scales(blocks, encode, reciprocal(encode), largest, MAE)
    else:
        scale, block_encode = block_scales(tl.max(tl.abs(to_float32(blocks)), 2), encode)
    values = e2m1_values(blocks, block_encode[:, :, None], *spread(scale[:, :, None], blocks), blocks, False)
    tl.store(out + offset, tl.reshape(values, (ROWS, BLOCK)), mask=n < columns)
