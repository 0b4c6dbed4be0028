"""Device functions shared by the kernels: rounding to E2M1, block scales, random bytes, the Hadamard butterfly.

Two rules keep the bits equal to the PyTorch reference. Launch with `enable_fp_fusion=False`, or a multiply and an add
become one operation with one rounding; and divide with `tl.div_rn`, since the plain division is approximate on a GPU.

The tensor's amax must show a NaN: in a thread it is taken with a maximum that keeps NaN, across threads as integers,
since the bits of |x| order like |x| with NaN above infinity. Blocks need no such care: a tensor with a NaN decodes to
NaN as a whole.

What PyTorch does in two steps of packed or directed arithmetic has one instruction here and there, which Triton does
not name: short pieces of PTX, each beside the same arithmetic in Triton's words for its interpreter.
"""

import triton
import triton.language as tl

# Triton's interpreter, which tests the kernels without a GPU, truncates where the hardware rounds to nearest even.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
EXPONENT = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-0x80000000)
# Programs of an amax kernel; each leaves the largest that it has seen in a slot of its own.
SLOTS = tl.constexpr(4 if INTERPRETED.value else 512)


@triton.jit
def magnitude_bits(x):
    """Bits of |x| as int32, for x in FP32."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def to_float32(x):
    """FP32 copy of BF16 or FP32 values."""
    if x.dtype == tl.float32:
        return x
    elif INTERPRETED:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )


@triton.jit
def larger(a, b):
    """The larger magnitude of two BF16 or FP32 numbers, with a sign that means nothing; NaN where either is NaN."""
    if a.dtype == tl.float32:
        return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)
    elif INTERPRETED:
        return to_bfloat16(tl.maximum(tl.abs(to_float32(a)), tl.abs(to_float32(b)), propagate_nan=tl.PropagateNan.ALL))
    else:
        return tl.inline_asm_elementwise(
            "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def scaled_magnitude(x, encode):
    """|x| * encode in FP32."""
    if x.dtype == tl.float32 or INTERPRETED:
        return tl.abs(to_float32(x)) * encode
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            shl.b32 low, $2, 16;
            abs.f32 low, low;
            and.b32 high, $2, 0x7FFF0000;
            mul.rn.f32 $0, low, $3;
            mul.rn.f32 $1, high, $4;
            }""",
            "=f,=f,r,f,f",
            [x, encode],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def to_bfloat16(x):
    """FP32 values rounded to BF16 (nearest even), two at a time."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = (bits & MAGNITUDE) > EXPONENT
        return tl.where(nan, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def rounded_to(x, dtype: tl.constexpr):
    """FP32 values as BF16 or FP32."""
    if dtype == tl.bfloat16:
        return to_bfloat16(x)
    else:
        return x


@triton.jit
def laid_out_like(index, loaded):
    """`index`, computed in the threads that hold `loaded`: Triton else computes it elsewhere and moves what follows."""
    if INTERPRETED:
        return index
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [index, loaded.to(tl.float32)], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def store_amax(amax, largest):
    """Enter the largest of a tensor of FP32 magnitudes into this program's slot of `amax`; their signs do not count."""
    tl.store(amax + tl.program_id(0), tl.max(magnitude_bits(largest), 0))


@triton.jit
def load_amax(amax):
    """Bits of the largest of all slots."""
    return tl.max(tl.load(amax + tl.arange(0, SLOTS)), 0)


@triton.jit
def leading_power(magnitude, MANTISSA: tl.constexpr):
    """max(2^floor(log2 y), smallest power with a mantissa of its own) of y >= 0.

    MANTISSA, the bits of an element's mantissa, stands for its type: 1 for E2M1, 2 for E5M2, 3 for E4M3.
    """
    SMALLEST: tl.constexpr = 0x3F800000 if MANTISSA == 1 else 0x38800000 if MANTISSA == 2 else 0x3C800000
    binade = magnitude.to(tl.int32, bitcast=True) & EXPONENT
    return tl.maximum(binade, SMALLEST).to(tl.float32, bitcast=True)


@triton.jit
def element_nearest(magnitude, MANTISSA: tl.constexpr):
    """Nearest to y >= 0 of the numbers that continue an element's beyond its largest, ties to even.

    Adding 1.5 * 2^23 steps leaves a multiple of the step, rounded to even.
    """
    power = leading_power(magnitude, MANTISSA)
    MAGIC: tl.constexpr = 12582912.0 / 2**MANTISSA
    return tl.fma(power, -MAGIC, tl.fma(power, MAGIC, magnitude))


@triton.jit
def bounded_nearest(magnitude, MANTISSA: tl.constexpr):
    """Element nearest to y >= 0, its largest beyond; also for infinity."""
    LARGEST: tl.constexpr = 6.0 if MANTISSA == 1 else 57344.0 if MANTISSA == 2 else 448.0
    return element_nearest(tl.minimum(magnitude, LARGEST), MANTISSA)


@triton.jit
def with_sign(magnitude, x):
    """FP32 magnitudes with the signs of FP32 x."""
    bits = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & SIGN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_stochastic(magnitude, dither):
    """Neighbour of y >= 0 among the same numbers: floor(y / d + (r + .5) / 256) * d, for `dither` (r + .5) / 512.

    The sum is formed d times as large, which changes no bit; a sum with 2^23 d, rounded down, has no bits below d.
    """
    double = leading_power(magnitude, 1)
    raised = tl.fma(dither, double, magnitude)
    if INTERPRETED:
        return tl.floor(raised / (double * 0.5)) * (double * 0.5)
    else:
        whole = tl.inline_asm_elementwise(
            "fma.rm.f32 $0, $1, 0f4A800000, $2;", "=f,f,f", [double, raised], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.fma(double, -4194304.0, whole)


@triton.jit
def e2m1_values(x, encode, scale, limit, dither, STOCHASTIC: tl.constexpr):
    """E2M1 value of x * encode, clamped to [-6, 6], times `scale` (BF16): exact, in BF16. `limit` is 6 * scale.

    Clamping after rounding is clamping before it, 6 being a number of the grid.
    """
    magnitude = scaled_magnitude(x, encode)
    if STOCHASTIC:
        rounded = e2m1_stochastic(magnitude, dither)
    else:
        rounded = element_nearest(magnitude, 1)
    if INTERPRETED:
        values = tl.minimum(rounded * to_float32(scale), to_float32(limit))
        return to_bfloat16(tl.where(to_float32(x) < 0, -values, values))
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, zero;
            mov.b32 zero, 0x80008000;
            cvt.rn.bf16x2.f32 pair, $2, $1;
            fma.rn.bf16x2 pair, pair, $3, zero;
            min.bf16x2 pair, pair, $4;
            lop3.b32 $0, pair, $5, 0x80008000, 0xF8;
            }""",
            "=r,f,f,r,r,r",
            [rounded, scale, limit, x.to(tl.bfloat16)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def signed_bfloat16(magnitude, x):
    """FP32 magnitudes rounded to BF16, with the signs of x."""
    if INTERPRETED:
        return to_bfloat16(tl.where(to_float32(x) < 0, -magnitude, magnitude))
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $2, $1; lop3.b32 $0, pair, $3, 0x80008000, 0xF8; }",
            "=r,f,f,r",
            [magnitude, x.to(tl.bfloat16)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def tensor_scales(amax_bits, TOP: tl.constexpr = 2688.0):
    """(s_enc, s_dec) of NVFP4 from the bits of the tensor's amax; s_dec is NaN where amax is not finite, to show.

    TOP is the largest product of a block scale and an element.
    """
    amax = amax_bits.to(tl.float32, bitcast=True)
    encode = tl.minimum(tl.div_rn(TOP, amax), FLOAT_MAX)
    encode = tl.where(amax_bits >= EXPONENT, 1.0, encode)
    decode = tl.div_rn(1.0, encode)
    return encode, tl.where(amax_bits >= EXPONENT, float("nan"), decode)


@triton.jit
def spread(scale, like):
    """Block scales and six times as much, in BF16 (exact), for every element of `like`."""
    shape: tl.constexpr = like.shape
    return tl.broadcast_to(scale.to(tl.bfloat16), shape), tl.broadcast_to((scale * 6.0).to(tl.bfloat16), shape)


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded."""
    if INTERPRETED:
        return tl.div_rn(1.0, x)
    else:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def block_scales(block_amax, encode):
    """(S_b, enc_b) of NVFP4 for blocks with these amaxes: the E4M3 decode scale, and its encode scale.

    A block whose scale is 0 decodes to zeros whatever its elements are: it is encoded by 0, since what is out of all
    proportion to its scale would overflow on the way.
    """
    scale = bounded_nearest(block_amax * (encode * 0.16666667163372040), 3)
    return scale, tl.where(scale > 0, tl.minimum(reciprocal(scale * reciprocal(encode)), FLOAT_MAX), 0.0)


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
def dither_of(word, index):
    """(r + .5) / 512 for byte `index`, r, of a random word: the last bits of an FP32 number just above 2^14."""
    if INTERPRETED:
        return (((word >> (word * 0 + 8 * index)) & 0xFF).to(tl.float32) + 0.5) * 0.001953125
    else:
        above = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0x46800000, $2;",
            "=f,r,r",
            [word, index + 0x7650],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        return above - 16383.9990234375


@triton.jit
def byte_dithers(words, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """`dither_of` all 16 bytes of four words [ROWS, BLOCKS], as [ROWS, BLOCKS, 16]."""
    word = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))  # the last two dimensions count words
    word, byte = tl.broadcast(tl.reshape(word, (ROWS, BLOCKS, 4, 1)), tl.arange(0, 4)[None, None, None, :])
    return tl.reshape(dither_of(word, byte), (ROWS, BLOCKS, 16))


@triton.jit
def place(table, number, mask, SPLIT: tl.constexpr):
    """Number in the whole matrix of a block of 16 rows or columns, int64; `table` lists them where this is a part."""
    if SPLIT:
        return tl.load(table + number, mask=mask, other=0)
    else:
        return number.to(tl.int64)


@triton.jit
def row_words(
    key, row, first, block, columns, row_blocks, column_blocks, whole_columns, SPLIT: tl.constexpr, BLOCKS: tl.constexpr
):
    """Random words for rows first + `row` ([ROWS, 1]), in blocks of 16 along columns from number `block` on."""
    number = block + tl.arange(0, BLOCKS)[None, :]
    number = place(column_blocks, number, number < columns // 16, SPLIT)
    whole_row = place(row_blocks, first // 16, True, SPLIT) * 16 + first % 16 + row
    return element_words(key, whole_row * (whole_columns // 16) + number)


@triton.jit
def first_down(n, column_blocks, whole_rows, mask, SPLIT: tl.constexpr):
    """Number, in the whole transpose, of the first block of 16 down each column n."""
    return (place(column_blocks, n // 16, mask, SPLIT) * 16 + n % 16) * (whole_rows // 16)
