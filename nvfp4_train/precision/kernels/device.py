"""Device functions shared by the kernels: rounding to E2M1, block scales, random bytes, the Hadamard butterfly.

Two rules keep the bits equal to the PyTorch reference. Launch with `enable_fp_fusion=False`, or a multiply and an add become
one operation with one rounding; and divide with `tl.div_rn`, since the plain division is approximate on a GPU.

Magnitudes are compared as integers: the bits of |x| order like |x|, and NaN orders above infinity, so that a maximum taken over
bits keeps a NaN visible where a floating-point maximum would drop it.
"""

import triton
import triton.language as tl

# Triton's interpreter, which tests the kernels without a GPU, truncates where the hardware rounds to nearest even.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
EXPONENT = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def magnitude_bits(x):
    """Bits of |x| as int32, for x in FP32."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def to_float32(x):
    """FP32 copy of BF16 or FP32 values."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def rounded_to(x, dtype: tl.constexpr):
    """FP32 values rounded to BF16 (nearest even) and back, or as they are for FP32."""
    if dtype == tl.bfloat16:
        if INTERPRETED:
            bits = x.to(tl.int32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            return tl.where((bits & MAGNITUDE) > EXPONENT, x, rounded.to(tl.float32, bitcast=True))
        else:
            return to_float32(x.to(tl.bfloat16))
    else:
        return x


@triton.jit
def e4m3_nearest(x):
    """E4M3 value nearest to 0 <= x <= 448, ties to even, as FP32. Neighbours are 1/8 of the binade apart, 2^-9 below 2^-6."""
    binade = (x.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    magic = tl.maximum(binade * 0.125, 0.001953125) * 12582912.0
    return (x + magic) - magic


@triton.jit
def e2m1_step_bits(magnitude):
    """Bits of the distance between E2M1 neighbours at |y| <= 6: .5 below 2, 1 below 4, 2 above."""
    binade = magnitude.to(tl.int32, bitcast=True) & EXPONENT
    return tl.maximum(binade, 0x3F800000) - 0x00800000


@triton.jit
def e2m1_nearest(y):
    """E2M1 value nearest to y, ties to even; |y| <= 6. Adding 1.5 * 2^23 steps leaves a multiple of the step, rounded to even."""
    magic = e2m1_step_bits(tl.abs(y)).to(tl.float32, bitcast=True) * 12582912.0
    return (y + magic) - magic


@triton.jit
def e2m1_stochastic(y, random):
    """E2M1 neighbour of y: trunc(|y| / step + (r + .5) / 256) * step for the random byte r; |y| <= 6."""
    magnitude = tl.abs(y)
    step = e2m1_step_bits(magnitude)
    inverse = (0x7F000000 - step).to(tl.float32, bitcast=True)
    steps = tl.floor(magnitude * inverse + (random.to(tl.float32) + 0.5) * 0.00390625)
    rounded = steps * step.to(tl.float32, bitcast=True)
    return tl.where(y < 0, -rounded, rounded)


@triton.jit
def tensor_scales(amax_bits):
    """(s_enc, s_dec) of NVFP4 from the bits of the tensor's amax; s_dec is NaN where amax is not finite, so that it stays visible."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    encode = tl.minimum(tl.div_rn(2688.0, amax), FLOAT_MAX)
    encode = tl.where(amax_bits >= EXPONENT, 1.0, encode)
    decode = tl.div_rn(1.0, encode)
    return encode, tl.where(amax_bits >= EXPONENT, float("nan"), decode)


@triton.jit
def block_scales(block_amax_bits, encode):
    """(S_b, enc_b) of NVFP4 for blocks whose amax has these bits: the E4M3 decode scale as FP32, and its encode scale."""
    block_amax = block_amax_bits.to(tl.float32, bitcast=True)
    scale = tl.minimum(block_amax * (encode * 0.16666667163372040), 448.0)
    scale = e4m3_nearest(scale)
    return scale, tl.minimum(tl.div_rn(1.0, scale * tl.div_rn(1.0, encode)), FLOAT_MAX)


@triton.jit
def element_words(key, counter):
    """Philox words of the 16 elements that share each int64 counter."""
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    return tl.philox(key, low, high, low * 0, low * 0)


@triton.jit
def random_byte(words, index: tl.constexpr):
    """Byte `index` (0 to 15) of a Philox call's four words, lowest byte of the first word first."""
    return (words[index // 4] >> (8 * (index % 4))) & 0xFF


@triton.jit
def four_rows_of_words(key, first, row_stride, BLOCK: tl.constexpr):
    """Random words of four neighbouring rows of BLOCK elements: one int32 for four elements, four tensors of [BLOCK / 4].

    A call gives a whole block of 16 elements its bytes, while a thread holds four of them. Making the call in each of the four
    threads would cost four times as much; so each makes it for another row, and the words change hands.

    Args:
        first: index in the operand of the first element of the first row.
        row_stride: elements from row to row.
    """
    lane = tl.arange(0, BLOCK // 4)
    counter = (first + (lane % 4) * row_stride) // 16 + lane // 4
    w0, w1, w2, w3 = element_words(key, counter)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [lane, 2, 2]: the last two dimensions count w0, w1, w2, w3
    words = tl.permute(tl.reshape(words, (BLOCK // 16, 4, 4)), (0, 2, 1))  # block, word, row
    even, odd = tl.split(tl.reshape(words, (BLOCK // 4, 2, 2)))
    row0, row2 = tl.split(even)
    row1, row3 = tl.split(odd)
    return row0, row1, row2, row3


@triton.jit
def hadamard16(rows):
    """Unscaled Sylvester Hadamard transform over a tuple of 16 tensors: four butterfly stages in fixed order."""
    for stage in tl.static_range(4):
        mixed = ()
        for i in tl.static_range(16):
            if (i >> stage) & 1 == 0:
                mixed = mixed + (rows[i] + rows[i + (1 << stage)],)
            else:
                mixed = mixed + (rows[i - (1 << stage)] - rows[i],)
        rows = mixed
    return rows
