"""Four over six: let a block's largest value become 4 instead of 6 where that loses less.

E2M1 has a hole between 4 and 6. A block whose largest value is mapped to 6 rounds whatever falls near 5 badly; mapped
to 4, by a block scale half as large again, the same values fall on 2, 3 and 4. So every block is quantized both ways
and the better one is kept:

    s_enc   = min(256 * 6 / amax, FP32_MAX)    256, not 448: room to raise a block scale by half
    base    = fl(amax_block / 6) * s_enc
    S6, S4  = e4m3(base), e4m3(1.5 * base)
    decoded = element * S * amax / 1536
    error   = sum of |decoded - x| (mae) or of (decoded - x)^2 (mse)

in FP32, elements of a row added in order; a square tile then adds its sixteen rows by halves (8 + 8, 4 + 4, and
so on). S4 is taken where its error is strictly lower. Source: "Four Over Six", arXiv 2512.02010.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_train.precision.blocks import Blocks, Loaded, Scaled
from nvfp4_train.precision.nvfp4 import constant, encode_scales, tensor_decode, tensor_scales, to_e4m3
from nvfp4_train.precision.rounding import round_nearest_

TOP = 256.0 * 6.0


def scale(loaded: Loaded, amax: Tensor, measure: str) -> Scaled:
    """NVFP4 scales, each block's the better of two.

    Args:
        loaded: the matrix.
        amax: what the tensor scale follows: 0-d, or compact [rows, 1] or [1, columns] for row scaling.
        measure: mse or mae.
    """
    s_enc, s_dec = tensor_scales(amax, TOP)
    base = (loaded.block_amax / constant(6.0, amax)) * s_enc
    six, four = to_e4m3(base), to_e4m3(base * 1.5)
    better = _error(loaded, four, amax, s_enc, measure) < _error(loaded, six, amax, s_enc, measure)
    stored = torch.where(better, four.float(), six.float()).to(torch.float8_e4m3fn)
    return Scaled(encode_scales(stored, s_enc), stored, stored.float(), tensor_decode(s_dec))


def _error(loaded: Loaded, stored: Tensor, amax: Tensor, s_enc: Tensor, measure: str) -> Tensor:
    """Error of each block with the block scales `stored`, compact float32."""
    blocks = loaded.blocks
    encode, decode = encode_scales(stored, s_enc), stored.float()
    wide_amax = amax.expand(blocks.scale_shape)
    top = constant(TOP, amax)
    errors = torch.empty_like(decode)
    for rows, compact, (part, scratch, _) in loaded.chunks():
        loaded.encode(rows, encode[compact], part)
        round_nearest_(part, scratch, "e2m1")
        view = blocks.view(part)
        view.mul_(blocks.spread(decode[compact])).mul_(blocks.spread(wide_amax[compact])).div_(top)
        part.sub_(loaded.source[rows])
        part = part.mul_(part) if measure == "mse" else part.abs_()
        sums = blocks.sums(part)
        errors[compact] = _add_by_halves(sums, blocks) if blocks.square else sums
    return errors


def _add_by_halves(sums: Tensor, blocks: Blocks) -> Tensor:
    """Add the rows of each square tile: [rows, columns/size] or [rows/size, columns] to [rows/size, columns/size]."""
    if blocks.axis == 1:
        lines = sums.view(-1, blocks.size, sums.shape[1])
    else:
        lines = sums.view(sums.shape[0], -1, blocks.size).transpose(1, 2)
    while lines.shape[1] > 1:
        half = lines.shape[1] // 2
        lines = lines[:, :half] + lines[:, half:]
    return lines[:, 0]
