"""Linears by Transformer Engine, with a stand-in for it: what it is asked for, and that parameters stay the layer's."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_train.precision import te_linear
from nvfp4_train.precision.linear import attach
from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.runtime import PrecisionRuntime
from nvfp4_train.precision.te_linear import TeLinears, find_transformer_engine
from nvfp4_train.precision.te_recipes import map_linear

from . import te_stand_in
from .linears import module, precision, tensors

RECIPE = Passes("recipe", "recipe")


class Product(torch.autograd.Function):
    """Y = X W^T in float32; adds dW to main_grad, or starts it anew, as Transformer Engine does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, first: bool | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.first = weight, first
        return (x.float() @ weight.detach().t()).bfloat16()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        dw = dy.flatten(0, -2).float().t() @ x.flatten(0, -2).float()
        if ctx.first:
            ctx.weight.main_grad.zero_()
        ctx.weight.main_grad.add_(dw)
        return (dy.float() @ ctx.weight.detach()).bfloat16(), None, None


class StandIn(types.ModuleType):
    """`transformer_engine.pytorch`: keeps the recipes in force, and the first-micro-batch flags of all calls."""

    def __init__(self) -> None:
        super().__init__("transformer_engine.pytorch")
        self.recipes: list[Any] = []
        self.firsts: list[bool | None] = []
        self.entered = 0
        engine = self

        class Linear(torch.nn.Module):
            def __init__(self, inputs: int, outputs: int, **options: Any) -> None:
                super().__init__()
                assert options == {
                    "bias": False,
                    "params_dtype": torch.float32,
                    "device": "meta",
                    "fuse_wgrad_accumulation": True,
                }
                self.register_parameter("weight", torch.nn.Parameter(torch.empty(outputs, inputs, device="meta")))

            def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
                assert self.activation_dtype == x.dtype
                assert engine.recipes, "outside of autocast"
                engine.firsts.append(is_first_microbatch)
                return Product.apply(x, self.weight, is_first_microbatch)

        self.Linear = Linear

    @contextmanager
    def autocast(self, enabled: bool, recipe: Any) -> Any:
        assert enabled
        self.recipes.append(recipe)
        self.entered += 1
        yield
        self.recipes.pop()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, single_process: None) -> StandIn:
    made = StandIn()
    package, common = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.common")
    modules = {
        "transformer_engine": package,
        "transformer_engine.pytorch": made,
        "transformer_engine.common": common,
        "transformer_engine.common.recipe": te_stand_in,
    }
    for name, stand_in in modules.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    return made


def layer(name: str, **options: Any) -> tuple[Any, PrecisionRuntime]:
    """A Megatron linear whose GEMMs the engine runs, with a gradient buffer, in step 1."""
    assignment = precision(name)
    made = module(**options)
    made.weight.main_grad = torch.zeros_like(made.weight)
    runtime = PrecisionRuntime(5, fuse_wgrad=True)
    recipe = map_linear(assignment, 1024)
    assert not isinstance(recipe, str)
    attach({assignment.name: made}, [assignment], runtime, TeLinears({assignment.name: recipe}, runtime))
    runtime.begin_step(1, RECIPE)
    return made, runtime


def micro_batch(made: Any, runtime: PrecisionRuntime, index: int) -> tuple[Tensor, Tensor]:
    x, _, dy = tensors(seed=index)
    runtime.begin_microbatch(index)
    leaf = x.view(4, 32, -1).requires_grad_()
    y, _ = made(leaf)
    y.backward(dy.view_as(y))
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def test_products_and_gradients_on_the_layer_s_own_weight(engine: StandIn) -> None:
    made, runtime = layer("nvfp4")
    assert [name for name, _ in made.named_parameters()] == ["weight"]
    assert [type(child) for child in made.modules()] == [type(made)]
    w = made.weight.detach()
    expected = torch.zeros_like(w)
    for index in (0, 1):
        x, _, dy = tensors(seed=index)
        y, dx = micro_batch(made, runtime, index)
        assert torch.equal(y.flatten(0, 1), (x.float() @ w.t()).bfloat16())
        assert torch.equal(dx.flatten(0, 1), (dy.float() @ w).bfloat16())
        expected += dy.float().t() @ x.float()
    torch.testing.assert_close(made.weight.main_grad, expected)
    runtime.check_observed([precision("nvfp4")], RECIPE)


def test_a_weight_is_quantized_once_a_step(engine: StandIn) -> None:
    made, runtime = layer("fp8_block")
    for index in (0, 1):
        micro_batch(made, runtime, index)
    runtime.end_step()
    with runtime.evaluating(), torch.no_grad():
        made(tensors()[0].view(4, 32, -1))
    runtime.begin_step(2, RECIPE)
    micro_batch(made, runtime, 0)
    assert engine.firsts == [True, False, None, True]


def test_bf16_phases_and_evaluations_pass_it_by(engine: StandIn) -> None:
    made, runtime = layer("fp8_block")
    with runtime.evaluating(bf16=True), torch.no_grad():
        made(tensors()[0].view(4, 32, -1))
    runtime.begin_step(2, Passes("bf16", "bf16"))
    micro_batch(made, runtime, 0)
    assert engine.firsts == []
    runtime.check_observed([precision("fp8_block")], Passes("bf16", "bf16"))


def test_histories_move_on_once_a_micro_batch(engine: StandIn) -> None:
    """The outermost autocast is what moves Transformer Engine's histories: one a micro-batch, not one a linear."""
    made, runtime = layer("fp8_delayed")
    assert runtime.histories is None
    assert not made.gemms.runtime.state_dict()
    for index in (0, 1):
        runtime.begin_microbatch(index)
        assert len(engine.recipes) == 1
    micro_batch(made, runtime, 2)
    assert len(engine.recipes) == 1
    runtime.end_step()
    assert engine.recipes == []
    assert engine.entered == 4  # three micro-batches and one linear


def test_what_is_installed_and_why_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise te_linear.importlib.metadata.PackageNotFoundError(package)

    def broken(name: str) -> Any:
        try:
            raise OSError("libcudnn.so.9: cannot open shared object file")
        except OSError as error:
            raise RuntimeError("could not be loaded\nand more") from error

    monkeypatch.setattr(te_linear.importlib.metadata, "version", missing)
    assert find_transformer_engine() == (None, None)
    monkeypatch.setattr(te_linear.importlib.metadata, "version", lambda package: "2.20.2")
    monkeypatch.setattr(te_linear.importlib, "import_module", broken)
    version, failure = find_transformer_engine()
    assert version == "2.20.2"
    assert (
        failure == "RuntimeError: could not be loaded; caused by OSError: libcudnn.so.9: cannot open shared object file"
    )
