"""Which implementation of the Mamba core runs: mamba-ssm's CUDA kernels or plain torch. The choice is said aloud."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig, ModelError
from models.convolution import causal_convolution
from models.mamba import MambaKernels, MambaWeights, MixerCore, torch_core
from models.mamba_tiles import fix_tiles
from models.norm import ACTIVATION_DTYPE
from models.shapes import mamba_conv_channels, mamba_in_proj_width

TOLERANCE = 2e-2
INSTALL = "pip install mamba-ssm causal-conv1d"


def import_or_reason(module: str, package: str) -> tuple[Any, str]:
    """The module and its package's version, or None and the reason why it is not there."""
    try:
        return importlib.import_module(module), f"{package} {importlib.metadata.version(package)}"
    except ModuleNotFoundError as error:
        if module.startswith(error.name or " "):
            return None, f"{package} not installed"
        return None, f"{package} can't be imported: {error}"
    except ImportError as error:
        return None, f"{package} can't be imported: {error}"


def choose_kernels(config: ModelConfig, device: torch.device) -> MambaKernels:
    """The Mamba core for this device, as `config.kernels` asks.

    Raises:
        ModelError: `mamba_ssm` was asked for and can't run here; names the cause.
    """
    if config.kernels == "torch" or device.type == "meta":
        return MambaKernels(torch_core, f"Mamba scan: PyTorch (kernels={config.kernels})")
    if device.type != "cuda":
        if config.kernels == "mamba_ssm":
            raise ModelError(
                f"model.kernels=mamba_ssm: its kernels need a CUDA device and this is a {device.type}. "
                "Write model.kernels=auto or model.kernels=torch"
            )
        return MambaKernels(torch_core, f"Mamba scan: PyTorch (slow path; no kernels for a {device.type})")
    ops, mamba = import_or_reason("mamba_ssm.ops.triton.ssd_combined", "mamba-ssm")
    if ops is None:
        if config.kernels == "mamba_ssm":
            raise ModelError(f"model.kernels=mamba_ssm: {mamba}. Install it ({INSTALL}), or write model.kernels=torch")
        return MambaKernels(torch_core, f"Mamba scan: PyTorch (slow path; {mamba})")
    tiles = fix_tiles(importlib.metadata.version("mamba-ssm"), config.mamba_head_dim, device)
    convolution, conv = import_or_reason("causal_conv1d", "causal-conv1d")
    if convolution is None:
        core = partial(_scan_core, ops.mamba_chunk_scan_combined)
        return MambaKernels(core, f"Mamba scan: {mamba} in {tiles}, convolution in PyTorch ({conv})")
    core = partial(_fused_core, ops.mamba_split_conv1d_scan_combined)
    return MambaKernels(core, f"Mamba scan: {mamba} with {conv}, in {tiles}")


def _fused_core(kernel: Any, projected: Tensor, weights: MambaWeights, documents: Tensor | None) -> Tensor:
    """Convolution, scan and gate in one kernel call: [s, b, z + x + B + C + dt] -> [s, b, d_inner], BF16, in memory
    [b, s, d_inner]: the norm that follows reads it where it lies.

    The kernels take BF16 activations beside FP32 parameters and keep sums and states in FP32.
    """
    y = kernel(
        projected.transpose(0, 1),
        weights.conv_weight.squeeze(1),
        weights.conv_bias,
        weights.dt_bias,
        -weights.A_log.exp(),
        D=weights.D,
        chunk_size=weights.chunk_size,
        activation="silu",
        headdim=weights.head_dim,
        ngroups=weights.num_groups,
        norm_before_gate=False,
        seq_idx=documents,
    )
    return y.transpose(0, 1)


def _scan_core(kernel: Any, projected: Tensor, weights: MambaWeights, documents: Tensor | None) -> Tensor:
    """The same with torch's convolution, where causal-conv1d is not installed."""
    z, xbc, dt = projected.split(weights.split_sizes, dim=-1)
    convolved = causal_convolution(xbc.float(), weights.conv_weight, weights.conv_bias, documents)
    xbc = F.silu(convolved).to(ACTIVATION_DTYPE)
    z, xbc, dt = (t.transpose(0, 1).contiguous() for t in (z, xbc, dt))
    x, B, C = xbc.split(weights.convolved_sizes, dim=-1)
    y = kernel(
        x.unflatten(-1, (-1, weights.head_dim)),
        dt,
        -weights.A_log.exp(),
        B.unflatten(-1, (weights.num_groups, -1)),
        C.unflatten(-1, (weights.num_groups, -1)),
        weights.chunk_size,
        D=weights.D,
        z=z.unflatten(-1, (-1, weights.head_dim)),
        dt_bias=weights.dt_bias,
        dt_softplus=True,
        seq_idx=documents,
    )
    return y.flatten(2).transpose(0, 1)


def compare_kernels(config: ModelConfig, kernels: MambaKernels, device: torch.device) -> float:
    """Run the chosen core and the PyTorch one, forward and backward, on a small random input of the model's sizes: once
    with rows of one document, once with borders between documents.

    Returns:
        The largest relative error (2-norm) over the outputs and every gradient.

    Raises:
        ModelError: the error is beyond what BF16 explains, or not a number.
    """
    reference = _outputs_and_gradients(torch_core, config, device)
    chosen = _outputs_and_gradients(kernels.core, config, device)
    worst, error = largest_error(chosen, reference)
    if not error <= TOLERANCE:
        raise ModelError(
            f"{kernels.description}: {worst} differs from the PyTorch scan by {error:.3g} (limit {TOLERANCE}), "
            f"so training with these kernels would go wrong. Reinstall them ({INSTALL}) or write model.kernels=torch"
        )
    return error


def largest_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[str, float]:
    """Name of what differs most, and by how much relative to its 2-norm; NaN, where there is one, is the most."""
    errors = {name: ((found[name] - value).norm() / value.norm()).item() for name, value in expected.items()}
    return max(errors.items(), key=lambda item: float("inf") if math.isnan(item[1]) else item[1])


def _outputs_and_gradients(core: MixerCore, config: ModelConfig, device: torch.device) -> dict[str, Tensor]:
    """Outputs and gradients of both passes, FP32, from the same random numbers at every call."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    heads, channels = config.mamba_num_heads, mamba_conv_channels(config)
    projected = normal(2 * config.mamba_chunk_size + 3, 2, mamba_in_proj_width(config)).to(ACTIVATION_DTYPE)
    parameters: dict[str, Any] = {
        "conv_weight": normal(channels, 1, config.mamba_conv_width) / 2,
        "conv_bias": normal(channels) / 2,
        "dt_bias": normal(heads) - 3,
        "A_log": normal(heads).abs(),
        "D": normal(heads),
    }
    sizes: dict[str, Any] = {
        "head_dim": config.mamba_head_dim,
        "state_dim": config.mamba_state_dim,
        "num_groups": config.mamba_num_groups,
        "chunk_size": config.mamba_chunk_size,
    }
    leaves = {"input": projected, **parameters}
    for leaf in leaves.values():
        leaf.requires_grad_()
    length, chunk = projected.shape[0], config.mamba_chunk_size
    borders = torch.tensor([[chunk // 2, chunk, chunk + 1], [3, chunk + 7, 2 * chunk]], device=device)
    positions = torch.arange(length, device=device)
    found: dict[str, Tensor] = {}
    for kind, documents in (("", None), (" with borders between documents", _documents(positions, borders))):
        y = core(projected, MambaWeights(**parameters, **sizes), documents)
        gradients = torch.autograd.grad(y, list(leaves.values()), normal(*y.shape).to(y.dtype))
        found[f"the output{kind}"] = y.detach().float()
        for name, gradient in zip(leaves, gradients, strict=True):
            found[f"the gradient of {name}{kind}"] = gradient.float()
    return found


def _documents(positions: Tensor, borders: Tensor) -> Tensor:
    """[s] positions and [b, borders] first tokens of new documents -> [b, s] int32 numbers of documents."""
    return (positions >= borders.unsqueeze(-1)).sum(1, dtype=torch.int32)
