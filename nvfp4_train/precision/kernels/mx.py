"""MXFP4 and MXFP8 on a GPU: one pass, since no scale needs more than its block of 32.

As in `nvfp4.py`: values along features, and of the (rotated) transpose along tokens, from one read of 32 rows.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import (
    EXPONENT,
    INTERPRETED,
    element_nearest,
    laid_out_like,
    magnitude_bits,
    rounded_to,
    scaled_magnitude,
    signed_product,
)
from nvfp4_train.precision.kernels.rows import (
    blocks_across,
    eights_across,
    for_each_eight,
    largest_across,
    largest_of,
    largest_of_eights,
    load_blocks,
    load_rows,
    rotated_rows,
    store_half_blocks,
)
from nvfp4_train.precision.kernels.stochastic import (
    dither_of,
    dithers_across,
    e2m1_stochastic,
    element_words,
    first_down,
    magnitudes_to_cut,
    place,
    read_keys,
    words_across,
)

SIZE = tl.constexpr(32)


@triton.jit
def power_of_two(exponent):
    """2^e as FP32 for -127 <= e <= 127."""
    return tl.where(exponent == -127, 0x00400000, (exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def mx_scales(amax_bits, MANTISSA: tl.constexpr, UP: tl.constexpr):
    """(encode, decode) scales of blocks with these bits of amaxes: 2^-e and 2^e, the latter NaN for a block with one.

    The exponent that divides amax to at most the element type's largest (1.5 * 2^2 or 1.75 * 2^8) is one higher where
    amax has more after its leading bit; an addition carries it. A denormal amax comes out below -127 either way.
    """
    if MANTISSA == 1:
        carry: tl.constexpr = 0x3FFFFF if UP else 0
        EMAX: tl.constexpr = 2
    else:
        carry: tl.constexpr = 0x1FFFFF if UP else 0
        EMAX: tl.constexpr = 8
    finite = amax_bits < EXPONENT
    exponent = tl.where(finite, ((amax_bits + carry) >> 23) - 127 - EMAX, -127)
    exponent = tl.maximum(exponent, -127)
    return power_of_two(-exponent), tl.where(finite, power_of_two(exponent), float("nan"))


@triton.jit
def mx_nearest(x, encode, decode, MANTISSA: tl.constexpr):
    """Element nearest to x * encode, its type's largest beyond, times decode (BF16), rounded to BF16.

    A power of two leaves x no more bits than it had: BF16 is rounded in BF16, as `device.element_nearest` does in FP32.
    """
    LARGEST: tl.constexpr = 6.0 if MANTISSA == 1 else 448.0
    if x.dtype == tl.float32 or INTERPRETED:
        return signed_product(element_nearest(scaled_magnitude(x, encode), MANTISSA), x, decode, LARGEST)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 y, power, factor, zero;
            mov.b32 zero, 0x80008000;
            abs.bf16x2 y, $1;
            fma.rn.bf16x2 y, y, $2, zero;
            and.b32 power, y, 0x7F807F80;
            max.bf16x2 power, power, $4;
            fma.rn.bf16x2 y, power, $5, y;
            fma.rn.bf16x2 y, power, $6, y;
            min.bf16x2 y, y, $7;
            lop3.b32 factor, $1, 0x80008000, $3, 0xEA;
            fma.rn.bf16x2 $0, y, factor, zero;
            }""",
            "=r,r,r,r,r,r,r,r",
            [
                x, encode.to(tl.bfloat16), decode,
                tl.full(x.shape, 1.0 if MANTISSA == 1 else 0.015625, tl.bfloat16),
                tl.full(x.shape, 192.0 / 2**MANTISSA, tl.bfloat16),
                tl.full(x.shape, -192.0 / 2**MANTISSA, tl.bfloat16),
                tl.full(x.shape, LARGEST, tl.bfloat16),
            ],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )  # fmt: skip


@triton.jit
def mx_columns(
    x, out, key, columns, first, n, mask, row_blocks, column_blocks, whole_rows, STOCHASTIC: tl.constexpr,
    SIGNS: tl.constexpr, SPLIT: tl.constexpr, MANTISSA: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """Values of 32 rows from `first` on, rotated where SIGNS >= 0, in blocks along the rows."""
    base = first * columns
    operand = load_rows(x + base, columns, n, mask, 32)
    if SIGNS >= 0:
        rotated = rotated_rows(operand, SIGNS, 32)
        operand = ()
        for i in tl.static_range(32):
            operand = operand + (rounded_to(rotated[i], x.dtype.element_ty),)
    encode, decode = mx_scales(magnitude_bits(largest_of(operand, 32)), MANTISSA, UP)
    decode = decode.to(tl.bfloat16)
    words = operand
    if STOCHASTIC:
        row = first_down(laid_out_like(n, operand[0]), column_blocks, whole_rows, mask, SPLIT)
        words = element_words(key, row + place(row_blocks, first // 16, True, SPLIT))
        words = words + element_words(key, row + place(row_blocks, first // 16 + 1, True, SPLIT))
    for i in tl.static_range(32):
        if STOCHASTIC:
            magnitude = magnitudes_to_cut(operand[i], encode, x.dtype.element_ty == tl.bfloat16)
            values = e2m1_stochastic(magnitude, operand[i], decode, dither_of(words[i // 4], i % 4))
        else:
            values = mx_nearest(operand[i], encode, decode, MANTISSA)
        tl.store(out + base + (i * columns + n), values, mask=mask)


@triton.jit
def nearest_across(
    x, out, columns, block, MANTISSA: tl.constexpr, UP: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Nearest values of ROWS rows, in blocks along BLOCK columns, the first of which is 16 * `block`.

    Four threads share a block.
    """
    offset, mask = eights_across(columns, block, FULL, ROWS, BLOCK)
    eights = tl.load(x + offset, mask=mask, other=0.0)
    encode, decode = mx_scales(largest_of_eights(eights, 4), MANTISSA, UP)
    encode, decode = for_each_eight(encode, eights, 4), for_each_eight(decode.to(tl.bfloat16), eights, 4)
    tl.store(out + offset, mx_nearest(eights, encode, decode, MANTISSA), mask=mask)


@triton.jit
def stochastic_across(
    x, out, key, columns, first, block, row_blocks, column_blocks, whole_columns, SPLIT: tl.constexpr,
    MANTISSA: tl.constexpr, UP: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same, rounded stochastically, of rows from `first` on. Two threads share a block."""
    row, number, mask = blocks_across(columns, block, FULL, ROWS, BLOCK)
    offset = row * columns + number * 16
    halves = load_blocks(x, offset, mask)
    largest = largest_across(halves)
    bits = tl.max(tl.reshape(magnitude_bits(largest), (ROWS * (BLOCK // SIZE), 2)), 1)
    encode, decode = mx_scales(bits, MANTISSA, UP)
    encode, decode = for_each_eight(encode, halves[0], 2), for_each_eight(decode.to(tl.bfloat16), halves[0], 2)
    words = words_across(
        key, first, laid_out_like(row, largest), laid_out_like(number, largest), columns, row_blocks, column_blocks,
        whole_columns, SPLIT,
    )  # fmt: skip
    for half in tl.static_range(2):
        magnitude = magnitudes_to_cut(halves[half], encode, x.dtype.element_ty == tl.bfloat16)
        dithers = dithers_across(words[2 * half], words[2 * half + 1])
        store_half_blocks(out, offset, mask, half, e2m1_stochastic(magnitude, halves[half], decode, dithers))


@triton.jit
def mx_rows(
    x, out, key, columns, first, block, row_blocks, column_blocks, whole_columns, STOCHASTIC: tl.constexpr,
    SPLIT: tl.constexpr, MANTISSA: tl.constexpr, UP: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Values of ROWS rows from `first` on, in blocks along BLOCK columns, the first of which is 16 * `block`."""
    x += first * columns
    out += first * columns
    if STOCHASTIC:
        stochastic_across(
            x, out, key, columns, first, block, row_blocks, column_blocks, whole_columns, SPLIT, MANTISSA, UP, FULL,
            ROWS, BLOCK,
        )  # fmt: skip
    else:
        nearest_across(x, out, columns, block, MANTISSA, UP, FULL, ROWS, BLOCK)


@triton.jit(do_not_specialize=["row_key", "column_key"])
def mx_kernel(
    x,
    row_out,
    column_out,
    row_blocks,
    column_blocks,
    row_key,
    column_key,
    columns,
    whole_rows,
    whole_columns,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    ROW_STOCHASTIC: tl.constexpr,
    COLUMN_STOCHASTIC: tl.constexpr,
    SIGNS: tl.constexpr,
    SPLIT: tl.constexpr,
    MANTISSA: tl.constexpr,
    ROW_UP: tl.constexpr,
    COLUMN_UP: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Values of x in blocks along columns, and of its (rotated) transpose in blocks along rows.

    The keys, `row_blocks`, `column_blocks` and SPLIT as in `nvfp4.values_kernel`.
    """
    first = tl.program_id(1).to(tl.int64) * SIZE
    block = tl.program_id(0) * (BLOCK // 16)
    row_key, column_key = read_keys(row_key, column_key, ROW_STOCHASTIC, COLUMN_STOCHASTIC)
    if COLUMN:
        n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = (n < columns) | FULL
        mx_columns(
            x, column_out, column_key, columns, first, n, mask, row_blocks, column_blocks, whole_rows,
            COLUMN_STOCHASTIC, SIGNS, SPLIT, MANTISSA, COLUMN_UP,
        )  # fmt: skip
    if ROW:
        # Rows at a time: a few, which are still in the L1 cache, or all, whose reads so wait together.
        ROWS: tl.constexpr = 8 if COLUMN or ROW_STOCHASTIC else SIZE
        for step in range(SIZE // ROWS):
            mx_rows(
                x, row_out, row_key, columns, first + step * ROWS, block, row_blocks, column_blocks, whole_columns,
                ROW_STOCHASTIC, SPLIT, MANTISSA, ROW_UP, FULL, ROWS, BLOCK,
            )  # fmt: skip


@triton.jit
def mx_square_kernel(x, out, columns, MANTISSA: tl.constexpr, UP: tl.constexpr, BLOCK: tl.constexpr):
    """Values of x in 32x32 tiles, which serve x and its transpose."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < columns
    base = tl.program_id(0).to(tl.int64) * SIZE * columns
    rows = load_rows(x + base, columns, n, mask, 32)
    bits = tl.max(tl.reshape(magnitude_bits(largest_of(rows, 32)), (BLOCK // SIZE, SIZE)), 1)
    encode, decode = mx_scales(bits, MANTISSA, UP)
    encode = tl.broadcast_to(encode[:, None], (BLOCK // SIZE, SIZE))
    decode = tl.broadcast_to(decode.to(tl.bfloat16)[:, None], (BLOCK // SIZE, SIZE))
    for i in tl.static_range(32):
        blocks = tl.reshape(rows[i], (BLOCK // SIZE, SIZE))
        values = mx_nearest(blocks, encode, decode, MANTISSA)
        tl.store(out + base + (i * columns + n), tl.reshape(values, (BLOCK,)), mask=mask)
