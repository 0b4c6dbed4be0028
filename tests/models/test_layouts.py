"""Two processes under tensor, sequence, context and pipeline parallelism against one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.shapes import linear_shapes, stage_patterns
from tests.models.layout_worker import CONFIG, LAYOUTS, LENGTH, TIED, make_documents, make_tokens

pytestmark = pytest.mark.slow
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each of the two processes found, by layout."""
    folder: Path = tmp_path_factory.mktemp("layouts")
    command = [sys.executable, "-W", "ignore", "-m", "tests.models.layout_worker"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def alone(megatron: None) -> dict[bool, Any]:
    """The model in one process, untied and tied, after one backward pass: (loss, weights, gradients)."""
    from models.hybrid import build_model
    from tests.models.plain_linears import PLAIN

    found, tokens = {}, make_tokens()
    for config in (CONFIG, TIED):
        model = build_model(config, PLAIN, sequence_length=LENGTH, seed=1)
        loss = model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous())
        loss.sum().backward()
        named = dict(model.named_parameters())
        gradients = {name: parameter.grad for name, parameter in named.items()}
        found[config.tie_embeddings] = (loss.detach(), {k: v.detach() for k, v in named.items()}, gradients)
    return found


def whole(name: str, shares: list[dict[str, Any]], what: str) -> Tensor:
    """One tensor from the shares of both ranks, or the rank's that holds it."""
    holders = [share for share in shares if name in share[what]]
    dim, sizes = holders[0]["marks"].get(name, (None, None))
    if dim is None or len(holders) == 1:
        return holders[0][what][name]
    sizes = sizes or [holders[0][what][name].shape[dim]]
    cut = [share[what][name].split(sizes, dim) for share in holders]
    return torch.cat([piece for pieces in zip(*cut, strict=True) for piece in pieces], dim)


def shares_of(ranks: Ranks, layout: str) -> list[dict[str, Any]]:
    """Both ranks' findings; where tensor parallelism is off, nothing is cut."""
    shares = [found[layout] for found in ranks]
    return shares if "tensor" in LAYOUTS.get(layout, {}) else [share | {"marks": {}} for share in shares]


def in_order(shares: list[dict[str, Any]]) -> Tensor:
    """The losses of both context ranks in the order of the row."""
    from models.attention import positions_of_rank

    places = torch.cat([positions_of_rank(rank, 2, LENGTH // 2, torch.device("cpu")) for rank in range(2)])
    return torch.cat([share["loss"] for share in shares], 1)[:, places.argsort()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_are_bitwise_equal(ranks: Ranks, alone: dict[bool, Any], layout: str) -> None:
    shares, (_, weights, _) = shares_of(ranks, layout), alone[False]
    assert set().union(*(share["weights"] for share in shares)) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(whole(name, shares, "weights"), weight), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients(ranks: Ranks, alone: dict[bool, Any], layout: str) -> None:
    """Equal up to BF16's rounding: sums over ranks are rounded in another order."""
    shares, (expected, _, gradients) = shares_of(ranks, layout), alone[False]
    loss = in_order(shares) if layout == "context" else shares[1]["loss"]
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=2e-3)
    for name, gradient in gradients.items():
        mine = whole(name, shares, "gradients")
        assert (mine - gradient).norm() / gradient.norm() < 2e-2, name


def test_documents_are_kept_apart_over_context_ranks(ranks: Ranks, megatron: None) -> None:
    from models.hybrid import build_model
    from tests.models.plain_linears import PLAIN

    model, tokens = build_model(CONFIG, PLAIN, sequence_length=LENGTH, seed=1), make_tokens()
    expected = model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous(), documents=make_documents())
    expected.sum().backward()
    shares = shares_of(ranks, "context documents")
    torch.testing.assert_close(in_order(shares), expected.detach(), rtol=2e-3, atol=2e-3)
    assert (in_order(shares) - in_order(shares_of(ranks, "context"))).abs().max() > 0.01
    for name, parameter in model.named_parameters():
        mine = whole(name, shares, "gradients")
        assert (mine - parameter.grad).norm() / parameter.grad.norm() < 2e-2, name


def test_pipeline_alone_changes_no_bit(ranks: Ranks, alone: dict[bool, Any]) -> None:
    shares, (expected, _, gradients) = shares_of(ranks, "pipeline"), alone[False]
    assert torch.equal(shares[1]["loss"], expected)
    for name, gradient in gradients.items():
        assert torch.equal(whole(name, shares, "gradients"), gradient), name


def test_names_are_global(ranks: Ranks) -> None:
    """Stages split the shapes between them, in order, with block numbers that run through."""
    shapes = {shape.name: (shape.in_features, shape.out_features) for shape in linear_shapes(CONFIG)}
    first, second = (share["linears"] for share in shares_of(ranks, "pipeline"))
    assert len(first) == 2 * len(stage_patterns(CONFIG, 2)[0])
    assert list({**first, **second}.items()) == list(shapes.items())
    for layout in ("tensor", "context"):
        assert [share["linears"] for share in shares_of(ranks, layout)] == [shapes, shapes]


def test_tied_embedding_over_two_stages(ranks: Ranks, alone: dict[bool, Any]) -> None:
    """Both stages hold the same weight; the sum of their gradients is the whole one."""
    shares, (expected, weights, gradients) = shares_of(ranks, "tied pipeline"), alone[True]
    name = "embedding.word_embeddings.weight"
    assert torch.equal(shares[0]["weights"][name], weights[name])
    assert torch.equal(shares[1]["weights"][name], weights[name])
    torch.testing.assert_close(shares[1]["loss"], expected, rtol=0, atol=0)
    both = shares[0]["gradients"][name] + shares[1]["gradients"][name]
    torch.testing.assert_close(both, gradients[name], rtol=1e-5, atol=1e-6)
