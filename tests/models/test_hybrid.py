"""The built model: names, dtypes, the loss, the vocabulary's padding, tied embeddings, counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from models.shapes import count_block_parameters, count_parameters, flops_per_token, linear_shapes
from tests.models.conftest import LENGTH, TINY, load_model_config

Build = Callable[..., Any]


def losses(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous())


def test_forward_and_backward(build: Build, tokens: torch.Tensor) -> None:
    model = build()
    loss = losses(model, tokens)
    assert loss.shape == (2, LENGTH)
    assert loss.dtype == torch.float32
    assert abs(loss.mean().item() - math.log(TINY.vocab_size)) < 0.1
    loss.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_residual_stream_is_bf16(build: Build, tokens: torch.Tensor) -> None:
    model, seen = build(), {}
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, out, i=i: seen.update({i: out}))
        for i, layer in enumerate([*model.decoder.layers, model.decoder.final_norm, model.output_layer])
    ]
    logits = model(tokens[:, :-1].contiguous())
    for hook in hooks:
        hook.remove()
    outputs = [out[0] if isinstance(out, tuple) else out for out in seen.values()]
    assert len(outputs) == 6
    assert {out.dtype for out in (*outputs, logits)} == {torch.bfloat16}


@pytest.mark.parametrize("tied", [False, True])
def test_named_linears_are_the_shapes(build: Build, tied: bool) -> None:
    from models.hybrid import named_linears
    from tests.models.plain_linears import PlainColumnLinear, PlainRowLinear

    model = build(tie_embeddings=tied)
    linears, shapes = named_linears(model), linear_shapes(TINY)
    assert list(linears) == [shape.name for shape in shapes]
    for shape in shapes:
        linear = linears[shape.name]
        assert (linear.input_size, linear.output_size) == (shape.in_features, shape.out_features)
        row = shape.role in ("out_proj", "proj", "fc2")
        assert type(linear) is (PlainRowLinear if row else PlainColumnLinear)
        if not (tied and shape.role == "output"):
            assert linear.weight.shape == (shape.out_features, shape.in_features)
    assert (model.output_layer.weight is None) == tied


def test_parameters_equal_the_closed_form(build: Build) -> None:
    for tied in (False, True):
        total = sum(parameter.numel() for parameter in build(tie_embeddings=tied).parameters())
        assert total == count_parameters(replace(TINY, tie_embeddings=tied))


@pytest.mark.parametrize("name", ["nemotron_nano_12b_v2", "nemotron_h_8b"])
def test_published_models_on_the_meta_device(megatron: None, name: str) -> None:
    from models.hybrid import build_model
    from tests.models.plain_linears import PLAIN

    config = load_model_config(name)
    model = build_model(config, PLAIN, sequence_length=8192, seed=1, device="meta")
    expected = {"nemotron_nano_12b_v2": 12_310_001_152, "nemotron_h_8b": 8_100_852_736}[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == expected == count_parameters(config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    for letter, layer in zip(config.pattern, model.decoder.layers, strict=True):
        assert sum(parameter.numel() for parameter in layer.parameters()) == count_block_parameters(config, letter)


def test_later_tokens_change_nothing_before_them(build: Build, tokens: torch.Tensor) -> None:
    model, changed = build(), tokens[:, :-1].clone()
    changed[:, 20] = (changed[:, 20] + 1) % TINY.vocab_size
    with torch.no_grad():
        before, after = model(tokens[:, :-1].contiguous()), model(changed)
    torch.testing.assert_close(after[:, :20], before[:, :20], rtol=0, atol=0)
    assert (after[:, 20:] != before[:, 20:]).any(dim=-1).all()


# ---- padded vocabulary


def test_padding_never_wins_and_takes_no_loss(megatron: None, tokens: torch.Tensor) -> None:
    """97 tokens, 112 rows: whatever the 15 padded rows hold, logits, loss and gradients do not see them."""
    from models.hybrid import build_model
    from tests.models.plain_linears import PLAIN

    model = build_model(TINY, PLAIN, sequence_length=LENGTH, seed=1)
    before = losses(model, tokens)
    with torch.no_grad():
        model.output_layer.weight[TINY.vocab_size :] = 1e3
    logits = model(tokens[:, :-1].contiguous())
    assert logits.shape[-1] == 112
    assert (logits[..., TINY.vocab_size :] == float("-inf")).all()
    assert logits.argmax(-1).max() < TINY.vocab_size
    after = losses(model, tokens)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    real = logits[..., : TINY.vocab_size].float().flatten(0, 1)
    expected = F.cross_entropy(real, tokens[:, 1:].flatten(), reduction="none").view_as(after)
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)
    after.sum().backward()
    gradient = model.output_layer.weight.grad
    assert (gradient[TINY.vocab_size :] == 0).all()
    assert (gradient[: TINY.vocab_size].abs().sum(1) > 0).all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_full_vocabulary_has_no_mask(build: Build, tokens: torch.Tensor) -> None:
    logits = build(vocab_size=112)(tokens[:, :-1].contiguous())
    assert logits.isfinite().all()


# ---- tied embeddings


def test_tied_gradient_is_the_sum_of_both_uses(megatron: None, tokens: torch.Tensor) -> None:
    from models.hybrid import build_model
    from tests.models.plain_linears import PLAIN

    tied = build_model(replace(TINY, tie_embeddings=True), PLAIN, sequence_length=LENGTH, seed=1)
    apart = build_model(TINY, PLAIN, sequence_length=LENGTH, seed=1)
    embedding = apart.embedding.word_embeddings.weight
    with torch.no_grad():
        apart.output_layer.weight.copy_(embedding)
    for model in (tied, apart):
        losses(model, tokens).sum().backward()
    both = embedding.grad + apart.output_layer.weight.grad
    torch.testing.assert_close(tied.embedding.word_embeddings.weight.grad, both, rtol=1e-6, atol=1e-6)


# ---- weight decay


def test_what_takes_no_weight_decay(build: Build) -> None:
    from models.hybrid import no_weight_decay

    names = [name for name, parameter in build().named_parameters() if no_weight_decay(name, parameter)]
    mamba = [f"mixer.{leaf}" for leaf in ("conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D", "norm.weight")]
    of_block = {"M": [*mamba, "norm.weight"], "-": ["pre_mlp_layernorm.weight"], "*": ["input_layernorm.weight"]}
    expected = [f"decoder.layers.{i}.{name}" for i, letter in enumerate(TINY.pattern) for name in of_block[letter]]
    assert sorted(names) == sorted([*expected, "decoder.final_norm.weight"])


# ---- operations


@pytest.mark.parametrize("pattern", ["M", "-", "*", "M-*M"])
def test_flops_equal_a_counter_of_matrix_products(build: Build, pattern: str) -> None:
    """Every matrix product of the forward pass; attention's are counted over the full square, twice the causal half."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    length = 2 * TINY.mamba_chunk_size
    config = replace(TINY, pattern=pattern)
    ids = torch.zeros(2, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        build(pattern=pattern)(ids)
    flops = flops_per_token(config, length)
    counted = sum(flops.linears.values()) + flops.scan + 2 * flops.attention
    assert counter.get_total_flops() == counted * ids.numel()


def test_six_operations_a_token_for_each_parameter() -> None:
    """For a big model at a short sequence, 6 operations a token for each parameter that multiplies."""
    config = load_model_config("nemotron_nano_12b_v2")
    embedding = config.vocab_size * config.hidden_size
    ratio = flops_per_token(config, 128).training / (count_parameters(config) - embedding)
    assert 6.0 < ratio < 6.2
