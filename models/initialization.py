"""Initial weights as a function of (seed, global parameter name, global position): the same model in every layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.shapes import num_blocks

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4
A_MIN, A_MAX = 1.0, 16.0
RESIDUAL_OUTPUTS = ("out_proj.weight", "linear_proj.weight", "linear_fc2.weight")


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on the run's seed and the parameter's global name alone."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def initial_values(name: str, shape: tuple[int, ...], seed: int, config: ModelConfig) -> Tensor:
    """The whole, unsharded initial tensor of one parameter, FP32 on the CPU.

    Linears and embedding: normal with `init_std`, projections back into the residual stream with
    init_std / sqrt(init_residuals_per_block * blocks). Convolution: uniform within 1 / sqrt(taps). Mamba-2 (arXiv
    2405.21060): softplus(dt_bias) log-uniform in [0.001, 0.1] with floor 0.0001, A uniform in [1, 16], D = 1. Norms: 1.
    """
    generator, leaf = parameter_generator(seed, name), name.rsplit(".", 1)[-1]
    if leaf == "D" or "norm" in name:
        return torch.ones(shape)
    if leaf == "dt_bias":
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        dt = torch.exp(math.log(DT_MIN) + uniform * math.log(DT_MAX / DT_MIN)).clamp(min=DT_FLOOR)
        return (dt + torch.log(-torch.expm1(-dt))).float()  # the inverse of softplus
    if leaf == "A_log":
        return torch.empty(shape, dtype=torch.float64).uniform_(A_MIN, A_MAX, generator=generator).log().float()
    if leaf in ("conv1d_weight", "conv1d_bias"):
        bound = 1 / math.sqrt(config.mamba_conv_width)
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    assert leaf == "weight", f"no rule for the initial values of {name}"
    std = config.init_std
    if name.endswith(RESIDUAL_OUTPUTS):
        std /= math.sqrt(config.init_residuals_per_block * num_blocks(config))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _parts(parameter: Tensor) -> tuple[int, list[int]]:
    """The dimension that tensor-parallel ranks split, and the local sizes of the parts that are split one by one."""
    dim = parameter.partition_dim  # type: ignore[attr-defined]
    return dim, getattr(parameter, "partition_sizes", [parameter.shape[dim]])


def unsharded_shape(parameter: Tensor, ranks: int) -> tuple[int, ...]:
    """Shape of the whole parameter, of which this rank holds a share."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= ranks  # type: ignore[attr-defined]
    return tuple(shape)


def local_share(whole: Tensor, parameter: Tensor, rank: int, ranks: int) -> Tensor:
    """The rank's share of the whole tensor; in_proj and the convolution are split part by part (z, x, B, C, dt)."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim, sizes = _parts(parameter)
    parts = whole.split([size * ranks for size in sizes], dim)
    return torch.cat([part.narrow(dim, rank * size, size) for part, size in zip(parts, sizes, strict=True)], dim)


@torch.no_grad()
def initialize(
    named: Iterable[tuple[str, nn.Parameter]], *, seed: int, config: ModelConfig, rank: int, ranks: int
) -> None:
    """Fill parameters in place.

    Args:
        named: global names and local parameters; a copy of a tied weight goes by the name of its original.
        seed: the run's.
        config: sizes and standard deviation.
        rank, ranks: the tensor-parallel ones.
    """
    for name, parameter in named:
        whole = initial_values(name, unsharded_shape(parameter, ranks), seed, config)
        parameter.copy_(local_share(whole, parameter, rank, ranks))
