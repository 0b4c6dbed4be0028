"""The model on a CUDA device: mamba-ssm's kernels against the PyTorch core, and a GPU against a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models.conftest import load_model_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_agree_with_the_reference_in_the_tables_tiles(deterministic: bool) -> None:
    from models.kernels import choose_kernels, compare_kernels
    from models.mamba_tiles import TILES, Tile, _kernels, shared_memory

    determinism = pytest.importorskip("mamba_ssm.utils.determinism")
    device = torch.device("cuda")
    before = determinism._deterministic_override
    determinism.set_deterministic_mode(deterministic)
    try:
        for name in ("quickstart", "nano", "1b"):
            config = load_model_config(name)
            kernels = choose_kernels(config, device)
            assert kernels.description.startswith("Mamba scan: mamba-ssm")
            assert kernels.description.endswith("in fixed tiles")
            assert compare_kernels(config, kernels, device) < 1e-2
    finally:
        determinism.set_deterministic_mode(before)
    ran, largest = {}, 0
    for _module, kernel in _kernels():
        tile = getattr(kernel, "best_config", None)  # of the last run
        if tile is not None:
            ran[kernel.base_fn.__name__] = Tile(tuple(tile.kwargs.values()), tile.num_warps, tile.num_stages)
            assert not kernel.cache  # none was tuned
            compiled = kernel.fn.device_caches[torch.cuda.current_device()][0].values()
            largest = max(largest, *(kernel.metadata.shared for kernel in compiled))
    assert ran == TILES
    assert largest <= shared_memory(64)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_loss_equals_the_one_of_a_cpu(megatron: None, kernels: str) -> None:
    from models.hybrid import build_model
    from tests.models.plain_linears import PLAIN

    config = replace(load_model_config("quickstart"), kernels=kernels)
    tokens = torch.randint(0, config.vocab_size, (2, 257), generator=torch.Generator().manual_seed(0))
    losses = []
    for device in ("cpu", "cuda"):
        chosen = replace(config, kernels="torch") if device == "cpu" else config
        model = build_model(chosen, PLAIN, sequence_length=256, seed=1, device=device)
        inputs, labels = (t.contiguous().to(device) for t in (tokens[:, :-1], tokens[:, 1:]))
        losses.append(model(inputs, labels=labels).detach().cpu())
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0.03)
    assert abs(losses[1].mean() - losses[0].mean()) < 1e-3


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_last_token_of_one_document_does_not_move_the_next(megatron: None, kernels: str) -> None:
    from models.hybrid import build_model
    from tests.models.plain_linears import PLAIN

    config = replace(load_model_config("quickstart"), kernels=kernels)
    model = build_model(config, PLAIN, sequence_length=256, seed=1, device="cuda")
    tokens = torch.randint(0, config.vocab_size, (2, 257), generator=torch.Generator().manual_seed(0))
    inputs, labels = (t.contiguous().to("cuda") for t in (tokens[:, :-1], tokens[:, 1:]))
    border = 131  # inside a chunk
    documents = (torch.arange(256, device="cuda") >= border).int().expand(2, -1).contiguous()
    changed = inputs.clone()
    changed[:, border - 1] = (changed[:, border - 1] + 1) % config.vocab_size
    before, after = (model(rows, labels=labels, documents=documents) for rows in (inputs, changed))
    assert torch.equal(before[:, border:], after[:, border:])
    assert not torch.equal(before[:, border - 1], after[:, border - 1])
    alone = model(inputs[:, border:].contiguous(), labels=labels[:, border:].contiguous())
    torch.testing.assert_close(before[:, border:], alone, rtol=0, atol=0.03)


def test_fused_kernels_equal_torch(megatron: None) -> None:
    import torch.distributed as dist

    from models.pointwise import choose_pointwise, compare_pointwise
    from tests.models import fused_checks

    device = torch.device("cuda")
    assert dist.is_initialized()
    for dtype in (torch.bfloat16, torch.float32):
        fused_checks.check_squared_relu("cuda", dtype)
        fused_checks.check_cross_entropy("cuda", dtype)
    fused_checks.check_visible("cuda")
    fused_checks.check_norms("cuda")
    for name in ("quickstart", "nano", "1b"):
        config = load_model_config(name)
        assert compare_pointwise(config, choose_pointwise(config, device), device) < 1e-2


def test_the_gradient_of_a_norm_repeats_bit_for_bit() -> None:
    from models.fused_norm import block_norm

    x, dy = (torch.randn(4096, 2, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(2048, device="cuda", requires_grad=True)
    runs = []
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        runs.append(torch.autograd.grad(block_norm(leaf, weight, 1e-5), (leaf, weight), (dy, dy)))
    for run in runs[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("name", ["quickstart", "nano", "1b", "nemotron_nano_12b_v2"])
def test_attention_is_cudnns_and_agrees_with_the_definition(name: str) -> None:
    from models.attention import choose_attention, compare_attention

    config, device = load_model_config(name), torch.device("cuda")
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(False)
        kernel = choose_attention(config, device)
        assert kernel.description.startswith("attention: cuDNN")
        assert compare_attention(config, kernel, device) < 1e-2
    finally:
        torch.use_deterministic_algorithms(before)
