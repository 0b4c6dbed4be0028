"""The mixer's core against the formulas token by token, and which kernels run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelError
from tests.models.conftest import LENGTH, TINY
from tests.models.test_scan import convolve, loop_over_time

Build = Callable[..., Any]


def mixer_inputs(batch: int = 3) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What in_proj gives, [35, b, 184] BF16, and parameters of 8 heads of 8, 2 groups with state 12."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"conv_weight": (112, 1, 4), "conv_bias": (112,), "dt_bias": (8,), "A_log": (8,), "D": (8,)}
    vectors = {name: torch.randn(*shape, generator=generator) / 2 for name, shape in shapes.items()}
    return torch.randn(LENGTH, batch, 184, generator=generator).bfloat16(), vectors


def core_output(projected: torch.Tensor, vectors: dict[str, torch.Tensor]) -> torch.Tensor:
    from models.mamba import MambaWeights, torch_core

    return torch_core(projected, MambaWeights(**vectors, head_dim=8, state_dim=12, num_groups=2, chunk_size=16))


def by_formula(projected: torch.Tensor, vectors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Convolution, softplus, scan and gate in FP64."""
    v = {name: tensor.double() for name, tensor in vectors.items()}
    z, xbc, dt = projected.double().split((64, 112, 8), dim=-1)
    padded = F.pad(xbc.permute(1, 2, 0), (3, 0))
    xbc = F.silu(F.conv1d(padded, v["conv_weight"], v["conv_bias"], groups=112)).permute(2, 0, 1)
    x, B, C = xbc.split((64, 24, 24), dim=-1)
    x, B, C = x.unflatten(-1, (8, 8)), B.unflatten(-1, (2, 12)), C.unflatten(-1, (2, 12))
    y = loop_over_time(x, F.softplus(dt + v["dt_bias"]), -v["A_log"].exp(), B, C, v["D"])
    return y.flatten(2) * F.silu(z)


def test_core_follows_the_formulas() -> None:
    projected, vectors = mixer_inputs()
    projected.requires_grad_()
    for vector in vectors.values():
        vector.requires_grad_()
    found, expected = core_output(projected, vectors), by_formula(projected, vectors)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)
    gradient = torch.randn_like(expected).bfloat16()
    leaves = [projected, *vectors.values()]
    for mine, theirs in zip(
        torch.autograd.grad(found, leaves, gradient),
        torch.autograd.grad(expected, leaves, gradient.double()),
        strict=True,
    ):
        assert ((mine - theirs).norm() / theirs.norm()) < 3e-3
        assert mine.dtype == theirs.dtype


def test_pieces_of_the_batch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import models.mamba

    projected, vectors = mixer_inputs()
    whole = core_output(projected, vectors)
    monkeypatch.setattr(models.mamba, "CPU_DECAY_ELEMENTS", 1)
    assert torch.equal(core_output(projected, vectors), whole)


def test_gate_comes_before_the_group_norm(build: Build) -> None:
    """Each group of d_inner / groups values has root mean square 1 after the norm, whatever the gate."""
    mixer = build().decoder.layers[0].mixer
    projected, _ = mixer_inputs(batch=2)
    with torch.no_grad():
        y = mixer._ssm_training(projected)
    assert y.shape == (LENGTH, 2, 64)
    assert y.dtype == torch.bfloat16
    mean_square = y.float().unflatten(-1, (2, 32)).square().mean(-1)
    torch.testing.assert_close(mean_square, torch.ones_like(mean_square), rtol=0.02, atol=0.02)


# ---- kernels


def test_slow_path_is_announced(build: Build) -> None:
    from models.hybrid import describe_kernels

    between, attention = "norms, squared ReLU and loss: PyTorch", "attention: PyTorch"
    assert describe_kernels(build()) == ["Mamba scan: PyTorch (slow path; no kernels for a cpu)", attention, between]
    assert describe_kernels(build(kernels="torch")) == ["Mamba scan: PyTorch (kernels=torch)", attention, between]
    assert describe_kernels(build(pattern="-")) == [between]


def test_kernels_that_are_not_there(megatron: None) -> None:
    from models.kernels import choose_kernels

    asked, cuda = replace(TINY, kernels="mamba_ssm"), torch.device("cuda")
    with pytest.raises(ModelError, match="need a CUDA device and this is a cpu"):
        choose_kernels(asked, torch.device("cpu"))
    with pytest.raises(ModelError, match=r"mamba-ssm not installed.*pip install.*kernels=torch"):
        choose_kernels(asked, cuda)
    assert choose_kernels(TINY, cuda).description == "Mamba scan: PyTorch (slow path; mamba-ssm not installed)"


def test_a_broken_installation_shows_its_cause(megatron: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import models.kernels

    def broken(_name: str) -> None:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(models.kernels.importlib, "import_module", broken)
    with pytest.raises(ModelError, match=r"can't be imported: libcudart\.so\.12"):
        models.kernels.choose_kernels(replace(TINY, kernels="mamba_ssm"), torch.device("cuda"))


def test_kernels_are_compared_with_the_reference(megatron: None) -> None:
    from models.kernels import compare_kernels
    from models.mamba import MambaKernels, MambaWeights, torch_core

    def zero_gradients(projected: torch.Tensor, weights: MambaWeights, documents: Tensor | None) -> torch.Tensor:
        out = torch_core(projected, weights, documents)
        return out.detach() + 0 * out

    def one_percent_off(projected: torch.Tensor, weights: MambaWeights, documents: Tensor | None) -> torch.Tensor:
        return torch_core(projected, weights, documents) * 1.01

    def leaky(projected: torch.Tensor, weights: MambaWeights, documents: Tensor | None) -> torch.Tensor:
        return torch_core(projected, weights)

    device = torch.device("cpu")
    assert compare_kernels(TINY, MambaKernels(torch_core, "itself"), device) == 0
    assert 0.005 < compare_kernels(TINY, MambaKernels(one_percent_off, "near"), device) < 0.02
    with pytest.raises(ModelError, match=r"Mamba scan: bad: the gradient of .* differs .* by 1 .*kernels=torch"):
        compare_kernels(TINY, MambaKernels(zero_gradients, "Mamba scan: bad"), device)
    with pytest.raises(ModelError, match="with borders between documents differs"):
        compare_kernels(TINY, MambaKernels(leaky, "Mamba scan: leaky"), device)


def scan_kernel(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, *, D: Tensor, z: Tensor, dt_bias: Tensor,
    dt_softplus: bool, seq_idx: Tensor | None,
) -> Tensor:  # fmt: skip
    """What mamba-ssm's mamba_chunk_scan_combined promises, batch first."""
    assert dt_softplus
    assert chunk_size == 16
    x, dt, B, C, z = (t.transpose(0, 1).float() for t in (x, dt, B, C, z))
    assert seq_idx is None or seq_idx.dtype == torch.int32
    y = loop_over_time(x, F.softplus(dt + dt_bias), A, B, C, D, seq_idx) * F.silu(z)
    return y.transpose(0, 1).bfloat16()


def fused_kernel(
    zxbcdt: Tensor, weight: Tensor, bias: Tensor, dt_bias: Tensor, A: Tensor, *, D: Tensor, chunk_size: int,
    activation: str, headdim: int, ngroups: int, norm_before_gate: bool, seq_idx: Tensor | None,
) -> Tensor:  # fmt: skip
    """What mamba-ssm's mamba_split_conv1d_scan_combined promises, batch first, weight [channels, taps]."""
    assert (activation, norm_before_gate) == ("silu", False)
    heads, channels = dt_bias.shape[0], bias.shape[0]
    inner = heads * headdim
    z, xbc, dt = zxbcdt.float().split((inner, channels, heads), dim=-1)
    documents = torch.zeros(xbc.shape[:2], dtype=torch.int32) if seq_idx is None else seq_idx
    xbc = convolve(xbc.transpose(0, 1), weight.unsqueeze(1), bias, documents).transpose(0, 1)
    x, B, C = F.silu(xbc).split((inner, (channels - inner) // 2, (channels - inner) // 2), dim=-1)
    x, z = x.unflatten(-1, (-1, headdim)), z.unflatten(-1, (-1, headdim))
    B, C = B.unflatten(-1, (ngroups, -1)), C.unflatten(-1, (ngroups, -1))
    y = scan_kernel(x, dt, A, B, C, chunk_size, D=D, z=z, dt_bias=dt_bias, dt_softplus=True, seq_idx=seq_idx)
    return y.flatten(2)


def test_kernels_get_what_they_promise_to_take(megatron: None) -> None:
    from models.kernels import _fused_core, _scan_core, compare_kernels
    from models.mamba import MambaKernels

    for core, kernel in ((_fused_core, fused_kernel), (_scan_core, scan_kernel)):
        kernels = MambaKernels(partial(core, kernel), kernel.__name__)
        assert compare_kernels(TINY, kernels, torch.device("cpu")) < 8e-3
