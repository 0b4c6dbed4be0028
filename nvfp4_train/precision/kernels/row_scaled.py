"""NVFP4 with a tensor scale for each row (token) on a GPU, four over six among it: blocks along the columns, nearest.

One pass leaves the amax of each row, so that ranks that share the columns can take the largest, a second the values.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    block_scales,
    e2m1_nearest,
    larger,
    magnitude_bits,
    tensor_scales,
    to_float32,
)
from nvfp4_train.precision.kernels.four_over_six import MAE, TOP, better_values, ordinary
from nvfp4_train.precision.kernels.rows import blocks_across, largest_across, load_blocks, store_half_blocks

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
def row_scaled_kernel(x, amax, out, scales, columns, MEASURE: tl.constexpr, BLOCK: tl.constexpr):
    """Values (element * block scale, BF16) of x; `scales` takes s_dec of each row. MEASURE: as in `nvfp4.py`."""
    row, number, mask = blocks_across(columns, tl.program_id(1) * (BLOCK // 16), False, ROWS, BLOCK)
    row += (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    bits = tl.load(amax + row)
    encode, decode = tensor_scales(bits, TOP if MEASURE else 2688.0)
    tl.store(scales + row, decode, mask=number == 0)
    offset = row.to(tl.int64) * columns + number * 16
    blocks = load_blocks(x, offset, mask)
    if MEASURE:
        largest = bits.to(tl.float32, bitcast=True)
        normal = tl.min(ordinary(largest).to(tl.int32), 0) == 1
        better = better_values(blocks, encode, largest, normal, MEASURE == MAE, False)
    else:
        scale, block_encode = block_scales(largest_across(blocks), encode)
        block_encode = tl.broadcast_to(block_encode[:, None], blocks[0].shape)
        scale = tl.broadcast_to(scale.to(tl.bfloat16)[:, None], blocks[0].shape)
    for half in tl.static_range(2):
        if MEASURE:
            values = better[half]
        else:
            values = e2m1_nearest(blocks[half], block_encode, scale)
        store_half_blocks(out, offset, mask, half, values)
