"""Stochastic rounding to E2M1, and its random bytes.

A byte r moves the neighbour of y up where y's fraction of the step, with 2 r + 1 parts of 512 added, makes a whole one.
FP16 numbers 2^-14 times as large as E2M1's show why that is one addition: their bits are the E2M1 code (both are
denormal below the same power), then nine bits of fraction. So y is cut to FP16, 2 r + 1 is added to its bits, for two
elements at once, and the code is what stands above the ninth bit.

The reference adds |y| / d and the byte's share in FP32. Below 1 / 2 that sum can have more bits than FP32, and is then
rounded up to a whole step from up to 2^-25 of a step away; so 2^-26 is added to y, rounded down. It is too little to
change a y whose sum FP32 holds.
"""

import triton
import triton.language as tl

from nvfp4_train.precision.kernels.device import INTERPRETED, scaled_magnitude, to_bfloat16, to_float32


@triton.jit
def wide_product(a, b: tl.constexpr):
    """High and low half of the 64-bit product of uint32 numbers."""
    if INTERPRETED:
        return tl.umulhi(a, a * 0 + b), a * b
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 product; mul.wide.u32 product, $2, $3; mov.b64 {$1, $0}, product; }",
            "=r,=r,r,r",
            [a, b],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def read_keys(row_key, column_key, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """The keys in memory at these addresses, of those that are read; the address for another."""
    if ROW:
        row_key = tl.load(row_key)
    if COLUMN:
        column_key = tl.load(column_key)
    return row_key, column_key


@triton.jit
def element_words(key, counter):
    """Four words of Philox-4x32-10 for the 16 elements that share each int64 counter, first elements first."""
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c2, c3 = wide_product(counter.to(tl.uint32), 0xD2511F53)  # words 2 and 3 of the counter are zero
    return philox_rounds(k0, k1, (counter >> 32).to(tl.uint32) ^ k0, c3 * 0, c2 ^ k1, c3)


@triton.jit
def philox_rounds(k0, k1, c0, c1, c2, c3):
    """What the last nine rounds of Philox-4x32-10 make of these words."""
    for _ in tl.static_range(9):
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
        high0, low0 = wide_product(c0, 0xD2511F53)
        high1, low1 = wide_product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


@triton.jit
def place(table, number, mask, SPLIT: tl.constexpr):
    """Number in the whole matrix of a block of 16 rows or columns, int64; `table` lists them where this is a part."""
    if SPLIT:
        return tl.load(table + number, mask=mask, other=0)
    else:
        return number.to(tl.int64)


@triton.jit
def first_down(n, column_blocks, whole_rows, mask, SPLIT: tl.constexpr):
    """Number, in the whole transpose, of the first block of 16 down each column n."""
    return (place(column_blocks, n // 16, mask, SPLIT) * 16 + n % 16) * (whole_rows // 16)


@triton.jit
def words_across(key, first, row, block, columns, row_blocks, column_blocks, whole_columns, SPLIT: tl.constexpr):
    """Random words of blocks of 16 along columns: those with number `block` in rows first + `row`."""
    whole_row = place(row_blocks, (first + row) // 16, block >= 0, SPLIT) * 16 + (first + row) % 16
    block = place(column_blocks, block, block < columns // 16, SPLIT)
    return element_words(key, whole_row * (whole_columns // 16) + block)


@triton.jit
def dither_of(word, INDEX: tl.constexpr):
    """256 r + 128, int16, for byte INDEX, r, of each word; neighbours have words of their own."""
    if INTERPRETED:
        return (((word >> 8 * INDEX) & 0xFF) * 256 + 128).to(tl.int16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 pair; prmt.b32 pair, $1, $2, $3; lop3.b32 $0, pair, 0xFF00FF00, 0x00800080, 0xEA; }",
            "=r,r,r,r,r",
            [word, tl.full(word.shape, INDEX * 0x1010 + 0x4000, tl.int32)],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def dithers_across(first, second):
    """`dither_of` all bytes of two words [N], as [N, 8]."""
    word, byte = tl.broadcast(tl.join(first, second)[:, :, None], tl.arange(0, 4)[None, None, :])
    word, byte = tl.reshape(word, (first.shape[0], 8)), tl.reshape(byte, (first.shape[0], 8))
    if INTERPRETED:
        return (((word >> (8 * byte).to(tl.uint32)) & 0xFF) * 256 + 128).to(tl.int16)
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0x00800080, $3;",
            "=r,r,r,r,r",
            [word, byte * 0x1010 + 0x1404],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def magnitudes_to_cut(x, encode, EXACT: tl.constexpr):
    """y / 2^14 for y = |x| * encode, to be cut; EXACT: y has no more bits than BF16, whose sums FP32 holds."""
    if EXACT:
        return scaled_magnitude(x, encode * 6.103515625e-05)
    y = scaled_magnitude(x, encode)
    if INTERPRETED:
        exact = y.to(tl.float64) * 6.103515625e-05 + 9.094947017729282e-13
        near = exact.to(tl.float32)
        bits = near.to(tl.int32, bitcast=True) - (near.to(tl.float64) > exact).to(tl.int32)
        return bits.to(tl.float32, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            "fma.rm.f32 $0, $1, 0f38800000, 0f2B800000;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def e2m1_stochastic(magnitude, x, scale, dither):
    """E2M1 neighbour of 2^14 * magnitude, at most 6, with x's sign, times `scale` (BF16), rounded to BF16."""
    if INTERPRETED:
        magnitude = tl.minimum(magnitude, 65504.0)
        below = (magnitude * 16777216.0).to(tl.int32)  # cut off, as FP16's denormal numbers are
        above = (magnitude.to(tl.int32, bitcast=True) >> 13) - (112 << 10)
        code = (tl.where(magnitude < 6.103515625e-05, below, above) + ((dither.to(tl.int32) & 0xFFFF) >> 7)) >> 9
        element = (code << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
        product = tl.minimum(element, 6.0) * to_float32(scale)
        return to_bfloat16(tl.where(to_float32(x) < 0, -product, product))
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, parts, factor, zero, shift, six;
            mov.b32 zero, 0x80008000;
            mov.b32 shift, 0x7E807E80;
            mov.b32 six, 0x40C040C0;
            cvt.rz.f16x2.f32 pair, $2, $1;
            shr.u32 parts, $3, 7;
            add.u32 pair, pair, parts;
            shr.u32 pair, pair, 3;
            and.b32 pair, pair, 0x0FC00FC0;
            fma.rn.bf16x2 pair, pair, shift, zero;
            min.bf16x2 pair, pair, six;
            lop3.b32 factor, $4, 0x80008000, $5, 0xEA;
            fma.rn.bf16x2 $0, pair, factor, zero;
            }""",
            "=r,f,f,r,r,r",
            [magnitude, dither, x.to(tl.bfloat16), scale],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
