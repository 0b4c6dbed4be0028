"""Device functions shared by the kernels: rounding to E2M1, block scales, random bytes, the Hadamard butterfly.

Two rules keep the bits equal to the PyTorch reference. Launch with `enable_fp_fusion=False`, or a multiply and an add
become one operation with one rounding; and divide with `tl.div_rn`, since the plain division is approximate on a GPU.

The tensor's amax must show a NaN: in a thread it is taken with a maximum that keeps NaN, across threads as integers,
since the bits of |x| order like |x| with NaN above infinity. Blocks need no such care: a tensor with a NaN decodes to
NaN as a whole.
"""

import triton
import triton.language as tl

# Triton's interpreter, which tests the kernels without a GPU, truncates where the hardware rounds to nearest even.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
EXPONENT = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-0x80000000)
# Programs of an amax kernel spread their atomics over this many numbers, one in each 32-byte sector.
SLOTS = tl.constexpr(32)
SLOT_STRIDE = tl.constexpr(8)


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
    """E4M3 value nearest to 0 <= x <= 448, ties to even, as FP32.

    Neighbours are 1/8 of the binade apart, 2^-9 below 2^-6.
    """
    binade = (x.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    magic = tl.maximum(binade * 0.125, 0.001953125) * 12582912.0
    return (x + magic) - magic


@triton.jit
def larger(a, b):
    """max(a, |b|) that keeps NaN, for a >= 0."""
    return tl.maximum(a, tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_amax(amax, program, largest):
    """Enter the largest of a tensor of magnitudes into this program's slot of `amax`, whose slots start at zero."""
    slot = amax + program % SLOTS * SLOT_STRIDE
    tl.atomic_max(slot, tl.max(magnitude_bits(largest), 0), sem="relaxed")


@triton.jit
def load_amax(amax):
    """Bits of the largest of all slots."""
    return tl.max(tl.load(amax + tl.arange(0, SLOTS) * SLOT_STRIDE), 0)


@triton.jit
def e2m1_step_bits(magnitude):
    """Bits of the distance between E2M1 neighbours at 0 <= y <= 6: .5 below 2, 1 below 4, 2 above."""
    binade = magnitude.to(tl.int32, bitcast=True) & EXPONENT
    return tl.maximum(binade, 0x3F800000) - 0x00800000


@triton.jit
def e2m1_nearest(magnitude):
    """E2M1 value nearest to 0 <= y <= 6, ties to even.

    Adding 1.5 * 2^23 steps leaves a multiple of the step, rounded to even.
    """
    magic = e2m1_step_bits(magnitude).to(tl.float32, bitcast=True) * 12582912.0
    return (magnitude + magic) - magic


@triton.jit
def floor_of(x):
    """floor(x) for 0 <= x < 2^22. A sum rounded down is eight times as fast as the GPU's own floor."""
    if INTERPRETED:
        return tl.floor(x)
    else:
        raised = tl.inline_asm_elementwise(
            "add.rm.f32 $0, $1, 0f4B000000;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return raised - 8388608.0


@triton.jit
def dither_of(byte_bits):
    """(r + .5) / 256 for a random byte r, given as r << 15: the mantissa of a number between 1 and 2."""
    return (byte_bits | 0x3F804000).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def e2m1_stochastic(magnitude, dither):
    """E2M1 neighbour of 0 <= y <= 6: floor(y / step + dither) * step."""
    step = e2m1_step_bits(magnitude)
    inverse = (0x7F000000 - step).to(tl.float32, bitcast=True)
    return floor_of(magnitude * inverse + dither) * step.to(tl.float32, bitcast=True)


@triton.jit
def e2m1(y, dither, STOCHASTIC: tl.constexpr):
    """E2M1 value of y clamped to [-6, 6]."""
    magnitude = tl.minimum(tl.abs(y), 6.0)
    if STOCHASTIC:
        rounded = e2m1_stochastic(magnitude, dither)
    else:
        rounded = e2m1_nearest(magnitude)
    return (rounded.to(tl.int32, bitcast=True) | (y.to(tl.int32, bitcast=True) & SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def tensor_scales(amax_bits):
    """(s_enc, s_dec) of NVFP4 from the bits of the tensor's amax; s_dec is NaN where amax is not finite, to show."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    encode = tl.minimum(tl.div_rn(2688.0, amax), FLOAT_MAX)
    encode = tl.where(amax_bits >= EXPONENT, 1.0, encode)
    decode = tl.div_rn(1.0, encode)
    return encode, tl.where(amax_bits >= EXPONENT, float("nan"), decode)


@triton.jit
def block_scales(block_amax, encode):
    """(S_b, enc_b) of NVFP4 for blocks with these amaxes: the E4M3 decode scale as FP32, and its encode scale."""
    scale = tl.minimum(block_amax * (encode * 0.16666667163372040), 448.0)
    scale = e4m3_nearest(scale)
    return scale, tl.minimum(tl.div_rn(1.0, scale * tl.div_rn(1.0, encode)), FLOAT_MAX)


@triton.jit
def element_words(key, counter):
    """Philox words of the 16 elements that share each int64 counter."""
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    return tl.philox(key, low, high, low * 0, low * 0)


@triton.jit
def random_dither(words, index: tl.constexpr):
    """`dither_of` byte `index` (0 to 15) of a Philox call's four words, lowest byte of the first word first."""
    word = words[index // 4].to(tl.int32, bitcast=True)
    if index % 4 < 2:
        byte = word << (15 - 8 * (index % 4))
    else:
        byte = word >> (8 * (index % 4) - 15)
    return dither_of(byte & 0x7F8000)


@triton.jit
def four_rows_of_words(key, first, row_stride, blocks, BLOCK: tl.constexpr):
    """Random words of four neighbouring rows of BLOCK elements, each [BLOCK / 4]: an int32 for four elements.

    A call gives a whole block of 16 elements its bytes, while a thread holds four of them. Making the call in each of
    the four threads would cost four times as much; so each makes it for another row, and the words change hands.

    Args:
        first: counter of the first block of the first row; counters count blocks of 16 elements of the operand.
        row_stride: counters from row to row.
        blocks: [BLOCK / 4], for each four elements their block's number in its row.
    """
    lane = tl.arange(0, BLOCK // 4)
    counter = first + (lane % 4) * row_stride + blocks
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
