"""Rounding to few bits, and the random bits that stochastic rounding needs.

Round to nearest has a bias once gradients are averaged over many tokens: a value that always sits below a decision
point is always rounded down. Stochastic rounding goes up with probability p = (distance to the lower neighbour) /
(distance between the neighbours), so that the expected value is the value itself, at the price of more noise. With
one random byte r it goes up when (r + 1/2) / 256 >= 1 - p.

The byte must not depend on who computes it, or a run would change with its layout, its recomputation and its
resumption. So nothing here has a state: the byte of an element is a pure function of a 64-bit key (seed, step,
micro-batch, linear, operand) and of the element's index in the whole operand. The function is Philox-4x32-10 (Salmon
et al., "Parallel random numbers: as easy as 1, 2, 3", 2011):

    key      64 bits: the low half is key word 0, the high half word 1
    counter  index of the element // 16, 64 bits: the low half is counter word 0, the high half word 1; words 2, 3 are 0
    output   four words of 32 bits, so 16 bytes: word 0 first, and of each word the lowest byte first;
             byte j of counter c belongs to element 16 c + j

Elements are counted row by row in the operand, whose rows run along the contraction of its GEMM. A rank that holds a
part of the operand counts as if it held all of it.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from nvfp4_train.precision.shards import Axis

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10
# Counters a batch: eight-byte words of a batch stay in the last-level cache, and two threads have work.
_BATCH = 1 << 16

Word = Tensor | int
# 64 bits: a number, or the same bits in an int64 0-d tensor, which a kernel reads when it runs.
Key = int | Tensor


def element_key(seed: int, step: int, microbatch: int, name: str, operand: str) -> int:
    """64-bit key of one operand's random bits.

    Args:
        seed: seed of the run.
        step: optimizer step.
        microbatch: global index of the micro-batch in the step.
        name: global name of the linear, with its global block number.
        operand: which tensor of which GEMM, for example `dgrad.gradient`.
    """
    text = json.dumps([seed, step, microbatch, name, operand]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def signed(key: int) -> int:
    """The same 64 bits as a number that int64 holds."""
    return key - (1 << 64) if key >> 63 else key


def philox(key: Key, counter: tuple[Word, Word, Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Philox-4x32-10 of many counters at once.

    Args:
        key: 64 bits; a tensor's never leave its device.
        counter: four 32-bit words, each a number or an int64 tensor of numbers in [0, 2^32).

    Returns:
        Four words of the same kind. Numbers stay numbers as long as they can, which makes the first rounds cheap.
    """
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1 = _mix(high1, c1, k0), low1
        c2, c3 = _mix(high0, c3, k1), low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, _low(c1), c2, _low(c3)


def _multiply(word: Word, multiplier: int) -> tuple[Word, Word]:
    """High and low half of a 64-bit product. Of tensors, both may carry rubbish above bit 32; `_mix` removes it."""
    product = word * multiplier
    return product >> 32, product if isinstance(product, Tensor) else product & _MASK


def _mix(high: Word, word: Word, key: Word) -> Word:
    if isinstance(high, Tensor) and high.dim():  # in place, unless it came of the key alone
        return high.bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(_MASK)
    return (word ^ (high ^ key)) & _MASK


def _low(word: Word) -> Word:
    return word & _MASK


def counter_words(index: Tensor, count: int) -> tuple[Word, Word, Word, Word]:
    """Counter words of int64 indices below `count`; the second is the number 0 where it is 0 for all."""
    if count <= 1 << 32:
        return index, 0, 0, 0
    return index & _MASK, index >> 32, 0, 0


def random_bytes(
    key: Key, rows: int | Axis, columns: int | Axis, *, axis: int = 1, device: torch.device | str = "cpu"
) -> Tensor:
    """Random bytes of every element of an operand [rows, columns], columns along the contraction.

    Args:
        key: 64 bits, see `element_key`.
        rows: rows of the operand, or where this rank's rows lie in it.
        columns: its columns, or where this rank's lie. Element (m, n) of the whole has index m * whole columns + n.
        axis: 1 gives them as uint8 [rows, columns]; 0 gives the transpose [columns, rows], contiguous.
        device: where to compute them.
    """
    whole = columns.size if isinstance(columns, Axis) else columns
    if whole % 16 or (isinstance(columns, Axis) and not columns.aligned(16)):
        operand = _bytes_of_whole(key, rows, columns, device)
        return operand if axis == 1 else operand.t().contiguous()
    across = _positions(columns, device)[::16] // 16
    down = _positions(rows, device) * (whole // 16)
    outer, inner = (down, across) if axis == 1 else (across, down)
    shape = (len(down), len(across), 16) if axis == 1 else (len(across), 16, len(down))
    out = torch.empty(shape, dtype=torch.uint8, device=device)
    step = max(1, _BATCH // max(1, len(inner)))
    count = (rows.size if isinstance(rows, Axis) else rows) * whole // 16
    for start in range(0, len(outer), step):
        counters = counter_words(outer[start : start + step, None] + inner, count)
        _write_bytes(philox(key, counters), out[start : start + step], axis)
    return out.flatten(1) if axis == 1 else out.flatten(0, 1)


def _positions(extent: int | Axis, device: torch.device | str) -> Tensor:
    if isinstance(extent, Axis):
        return extent.positions(device)
    return torch.arange(extent, dtype=torch.int64, device=device)


def _bytes_of_whole(key: Key, rows: int | Axis, columns: int | Axis, device: torch.device | str) -> Tensor:
    """Those of this rank, [rows, columns], cut from the bytes of the whole operand: any size, any place."""
    whole_rows = rows.size if isinstance(rows, Axis) else rows
    whole_columns = columns.size if isinstance(columns, Axis) else columns
    blocks = -(-whole_rows * whole_columns // 16)
    flat = random_bytes(key, 1, 16 * blocks, device=device).view(-1)
    operand = flat[: whole_rows * whole_columns].view(whole_rows, whole_columns)
    if isinstance(rows, Axis):
        operand = operand[rows.positions(device)]
    return operand[:, columns.positions(device)] if isinstance(columns, Axis) else operand


def _write_bytes(words: tuple[Word, Word, Word, Word], out: Tensor, axis: int) -> None:
    """Sixteen bytes of each call into uint8 `out` [m, n, 16] (axis 1) or [m, 16, n] (axis 0)."""
    if axis == 1:
        whole = out.view(torch.int32)
        for index, word in enumerate(words):
            whole[:, :, index] = word
        return
    stacked = torch.empty(len(out), 4, 1, out.shape[2], dtype=torch.int32, device=out.device)
    for index, word in enumerate(words):
        stacked[:, index, 0] = word
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=out.device).view(1, 1, 4, 1)
    out.view(len(out), 4, 4, -1).copy_(stacked >> shifts)


# Of each element type: largest value, smallest power of two with a mantissa of its own, mantissa bits.
_GRIDS = {"e2m1": (6.0, 1.0, 1), "e4m3": (448.0, 2.0**-6, 3), "e5m2": (57344.0, 2.0**-14, 2)}


def round_nearest_(scaled: Tensor, scratch: Tensor, element: str) -> Tensor:
    """Round to the nearest value of an element type, ties to even, in place; beyond the largest, to the largest.

    Neighbours are 2^-m of the value's power of two apart (m mantissa bits), and evenly spaced below the smallest power.
    Adding and subtracting 1.5 * 2^23 of that distance leaves the nearest multiple of it: the sum has no bits for less.

    Args:
        scaled: float32. A result of zero is +0; NaN stays.
        scratch: float32 of the same shape.
        element: e2m1, e4m3 or e5m2.
    """
    limit, smallest, mantissa_bits = _GRIDS[element]
    torch.clamp(scaled, -limit, limit, out=scaled)
    leading_power(scaled, smallest, scratch)
    magic = 1.5 * 2.0 ** (23 - mantissa_bits)
    torch.add(scaled, scratch, alpha=magic, out=scaled)
    return torch.sub(scaled, scratch, alpha=magic, out=scaled)


def round_stochastic_(scaled: Tensor, scratch: Tensor, element: str, random: Tensor) -> Tensor:
    """Round to a random neighbour of an element type, in place: floor(|y| / d + (r + 1/2) / 256) * d with y's sign,
    where d is the distance between the neighbours; that is 'up when (r + 1/2) / 256 >= 1 - p', but for the
    sum's rounding to FP32, which may take sides that differ by 2^-23 for equal: fewer than one element in a million.

    Args:
        scaled: float32 y; values beyond the largest become the largest, NaN stays.
        scratch: float32, three buffers of that shape [3, ...].
        element: e2m1, e4m3 or e5m2.
        random: uint8 r of the same shape.
    """
    limit, smallest, mantissa_bits = _GRIDS[element]
    magnitude, distance, dither = scratch
    torch.abs(scaled, out=magnitude).clamp_(max=limit)
    leading_power(magnitude, smallest, distance).mul_(2.0**-mantissa_bits)
    magnitude.div_(distance)
    dither.copy_(random).add_(0.5)
    # In place of trunc of signed numbers, which PyTorch does not vectorize on a CPU.
    torch.add(magnitude, dither, alpha=1 / 256, out=magnitude).floor_().mul_(distance)
    return torch.copysign(magnitude, scaled, out=scaled)


def leading_power(values: Tensor, smallest: float, out: Tensor) -> Tensor:
    """max(2^floor(log2 |value|), smallest) of float32 values into float32 `out`."""
    torch.bitwise_and(values.view(torch.int32), 0x7F800000, out=out.view(torch.int32))
    return out.clamp_(min=smallest)
