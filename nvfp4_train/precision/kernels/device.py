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
def magnitudes(x):
    """|x| in FP32."""
    if x.dtype == tl.float32 or INTERPRETED:
        return tl.abs(to_float32(x))
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; abs.f32 $0, $0; and.b32 $1, $2, 0x7FFF0000;",
            "=f,=f,r",
            [x],
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
def signed_product(magnitude, x, scale, LIMIT: tl.constexpr = None):
    """y, or min(y, LIMIT), with x's sign, times `scale`, rounded to BF16; y (FP32) and `scale` are exact in BF16."""
    limit: tl.constexpr = float("inf") if LIMIT is None else LIMIT
    if INTERPRETED:
        product = tl.minimum(magnitude, limit) * to_float32(scale)
        return to_bfloat16(tl.where(to_float32(x) < 0, -product, product))
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, factor, zero;
            mov.b32 zero, 0x80008000;
            cvt.rn.bf16x2.f32 pair, $2, $1;
            """
            + ("" if LIMIT is None else "min.bf16x2 pair, pair, $3;")
            + """
            lop3.b32 factor, $4, 0x80008000, $5, 0xEA;
            fma.rn.bf16x2 $0, pair, factor, zero;
            }""",
            "=r,f,f,r,r,r",
            [magnitude, tl.full(x.shape, limit, tl.bfloat16), x.to(tl.bfloat16), scale],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def e2m1_nearest(x, encode, scale):
    """Nearest E2M1 of x * encode, at most 6, times `scale` (BF16): exact, in BF16.

    Clamping after rounding is clamping before it, 6 being a number of the grid.
    """
    return signed_product(element_nearest(scaled_magnitude(x, encode), 1), x, scale, 6.0)


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
def reciprocal(x):
    """1 / x, correctly rounded, for 2^-126 <= x < 2^126."""
    if INTERPRETED:
        return tl.div_rn(1.0, x)
    else:
        # What rcp.rn.f32 does there, without its branch to what it does elsewhere.
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 near, error;
            rcp.approx.ftz.f32 near, $1;
            fma.rn.f32 error, $1, near, 0fBF800000;
            neg.f32 error, error;
            fma.rn.f32 $0, near, error, near;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def encode_scales(scale, decode):
    """min(1 / (S * s_dec), FLT_MAX) of E4M3 decode scales S of blocks; 0 where S is 0.

    A block whose scale is 0 decodes to zeros whatever its elements are: it is encoded by 0, since what is out of all
    proportion to its scale would overflow on the way. A small s_dec is raised for the division: products with it may
    be denormal.
    """
    lift = tl.where(decode < 8.673617379884035e-19, 18446744073709551616.0, 1.0)
    encode = reciprocal(scale * decode * lift) * lift
    return tl.where(scale > 0, tl.minimum(encode, FLOAT_MAX), 0.0)


@triton.jit
def block_scales(block_amax, encode):
    """(S_b, enc_b) of NVFP4 for blocks with these amaxes: the E4M3 decode scale, and its encode scale."""
    scale = bounded_nearest(block_amax * (encode * 0.16666667163372040), 3)
    return scale, encode_scales(scale, tl.div_rn(1.0, encode))
