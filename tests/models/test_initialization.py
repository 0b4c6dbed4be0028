"""Initial weights: values, and that they depend on seed, global name and global position alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from models.initialization import initial_values, local_share, unsharded_shape
from tests.models.conftest import TINY

Build = Callable[..., Any]


def test_mamba_parameters_start_in_their_ranges() -> None:
    name = "decoder.layers.0.mixer."
    dt = F.softplus(initial_values(f"{name}dt_bias", (20000,), 1, TINY).double())
    assert dt.min() >= 1e-3 * (1 - 1e-6)
    assert dt.max() <= 0.1 * (1 + 1e-6)
    assert abs(dt.log().mean().item() - math.log(1e-2)) < 0.05  # log-uniform
    A = initial_values(f"{name}A_log", (20000,), 1, TINY).double().exp()
    assert A.min() >= 1 - 1e-6
    assert A.max() <= 16 * (1 + 1e-6)
    assert abs(A.mean().item() - 8.5) < 0.1
    assert (initial_values(f"{name}D", (8,), 1, TINY) == 1).all()
    assert (initial_values(f"{name}norm.weight", (8,), 1, TINY) == 1).all()
    for leaf, shape in (("conv1d_weight", (5000, 1, 4)), ("conv1d_bias", (5000,))):
        values = initial_values(name + leaf, shape, 1, TINY)
        assert 0.49 < values.abs().max() <= 0.5
        assert abs(values.mean()) < 0.02


def test_linears_start_normal() -> None:
    """Four blocks: projections into the residual stream have 0.02 / sqrt(4)."""
    for path, std in (
        ("embedding.word_embeddings.weight", 0.02),
        ("output_layer.weight", 0.02),
        ("decoder.layers.0.mixer.in_proj.weight", 0.02),
        ("decoder.layers.0.mixer.out_proj.weight", 0.01),
        ("decoder.layers.1.mlp.linear_fc2.weight", 0.01),
        ("decoder.layers.2.self_attention.linear_proj.weight", 0.01),
        ("decoder.layers.2.self_attention.linear_qkv.weight", 0.02),
    ):
        values = initial_values(path, (300, 300), 1, TINY)
        assert values.std().item() == pytest.approx(std, rel=0.02), path
        assert abs(values.mean()) < std / 50, path


def test_residual_outputs_start_as_megatron_starts_those_of_hybrids(build: Build) -> None:
    """Its own standard deviation for the model as it is described to Megatron, and for a Transformer of two additions a
    layer.
    """
    megatron = build().config
    for residuals, hybrid in ((1, True), (2, False)):
        theirs = dataclasses.replace(megatron, output_layer_init_method=None, is_hybrid_model=hybrid)
        config = dataclasses.replace(TINY, init_residuals_per_block=residuals)
        values = initial_values("decoder.layers.0.mixer.out_proj.weight", (300, 300), 1, config)
        expected = theirs.output_layer_init_method.keywords["std"]
        assert values.std().item() == pytest.approx(expected, rel=0.01)


def test_seed_and_name_decide() -> None:
    first = initial_values("decoder.layers.0.mixer.in_proj.weight", (64, 64), 1, TINY)
    assert torch.equal(first, initial_values("decoder.layers.0.mixer.in_proj.weight", (64, 64), 1, TINY))
    for name, seed in (("decoder.layers.0.mixer.in_proj.weight", 2), ("decoder.layers.2.mixer.in_proj.weight", 1)):
        assert (first != initial_values(name, (64, 64), seed, TINY)).float().mean() > 0.99


def test_models_of_one_seed_are_equal(build: Build) -> None:
    from models.hybrid import build_model
    from tests.models.plain_linears import PLAIN

    again = build_model(TINY, PLAIN, sequence_length=7, seed=1)
    other = build_model(TINY, PLAIN, sequence_length=7, seed=2)
    for (name, mine), same, different in zip(
        build().named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(mine, same), name
        assert torch.equal(mine, different) == (name.endswith(".D") or "norm" in name), name


def test_built_mamba_parameters_are_fp32_and_in_range(build: Build) -> None:
    mixer = build().decoder.layers[0].mixer
    for parameter in (mixer.A_log, mixer.D, mixer.dt_bias):
        assert parameter.dtype == torch.float32
        assert parameter.shape == (8,)
    assert (mixer.D == 1).all()
    dt, A = F.softplus(mixer.dt_bias), mixer.A_log.exp()
    assert ((dt > 0.999e-3) & (dt < 0.1001)).all()
    assert ((A > 0.9999) & (A < 16.001)).all()


def test_loading_does_not_initialize_again(build: Build) -> None:
    from models.hybrid import build_model
    from tests.models.plain_linears import PLAIN

    saved = {name: torch.randn_like(value) for name, value in build().state_dict().items() if value is not None}
    model = build_model(TINY, PLAIN, sequence_length=7, seed=1)
    model.load_state_dict(saved, strict=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
        assert parameter.dtype == torch.float32


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_a_packed_parameter(ranks: int) -> None:
    """in_proj packs z, x, B, C and dt: each rank takes its share of each, and together they are the whole."""
    from models.mamba import mark_partitioned

    parts = [8, 8, 4, 4, 8]
    whole = torch.arange(sum(parts) * 3.0).view(-1, 3)
    packed = torch.nn.Parameter(torch.empty(sum(parts) // ranks, 3))
    mark_partitioned(packed, [part // ranks for part in parts])
    assert unsharded_shape(packed, ranks) == whole.shape
    shares = [local_share(whole, packed, rank, ranks) for rank in range(ranks)]
    cut = [share.split([part // ranks for part in parts]) for share in shares]
    assert torch.equal(torch.cat([piece for pieces in zip(*cut, strict=True) for piece in pieces]), whole)
    assert torch.equal(shares[1][: parts[0] // ranks], whole[parts[0] // ranks : 2 * parts[0] // ranks])


def test_shares_along_the_inner_dimension() -> None:
    row = torch.nn.Parameter(torch.empty(3, 4))
    for name, value in (("tensor_model_parallel", True), ("partition_dim", 1)):
        setattr(row, name, value)
    whole = torch.arange(24.0).view(3, 8)
    assert torch.equal(local_share(whole, row, 1, 2), whole[:, 4:])
    replicated = torch.nn.Parameter(torch.empty(8))
    assert unsharded_shape(replicated, 2) == (8,)
    assert torch.equal(local_share(torch.arange(8.0), replicated, 1, 2), torch.arange(8.0))
