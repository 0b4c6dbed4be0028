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


class State:
    """Scales and amaxes of the tensors of one pass: row 0 is the entry under way, the newest before it lies last."""

    def __init__(self, length: int, tensors: int) -> None:
        self.amax_history = torch.zeros(length, tensors)
        self.scale = torch.ones(tensors)

    def move_on(self, largest: float) -> None:
        amax = self.amax_history.amax(0)
        self.scale.copy_(torch.where(amax > 0, largest / amax, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0] = 0


class StandIn(types.ModuleType):
    """`transformer_engine.pytorch`: keeps the recipes in force, and the first-micro-batch flags of all calls."""

    def __init__(self) -> None:
        super().__init__("transformer_engine.pytorch")
        self.recipes: list[Any] = []
        self.firsts: list[bool | None] = []
        self.entered = 0
        self.group: Any = object()
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
                self.fp8_meta: dict[str, Any] = {}

            def init_fp8_meta_tensors(self, recipe: Any) -> None:
                assert self.fp8_meta.pop("num_gemms") == 1
                length = recipe.amax_history_len
                self.fp8_meta |= {"scaling_fwd": State(length, 3), "scaling_bwd": State(length, 2)}

            def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
                assert self.activation_dtype == x.dtype
                assert engine.recipes, "outside of autocast"
                engine.firsts.append(is_first_microbatch)
                if self.fp8_meta:
                    entry = self.fp8_meta["scaling_fwd"].amax_history[0]
                    for column, tensor in enumerate((x, self.weight)):
                        entry[column] = torch.maximum(entry[column], tensor.detach().abs().amax().float())
                return Product.apply(x, self.weight, is_first_microbatch)

        self.Linear = Linear

    @contextmanager
    def autocast(self, enabled: bool, recipe: Any, amax_reduction_group: Any) -> Any:
        assert enabled
        assert amax_reduction_group is self.group
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


def layer(engine: StandIn, name: str, history: int = 1024, **options: Any) -> tuple[Any, PrecisionRuntime]:
    """A Megatron linear whose GEMMs the engine runs, with a gradient buffer, in step 1."""
    assignment = precision(name)
    made = module(**options)
    made.weight.main_grad = torch.zeros_like(made.weight)
    runtime = PrecisionRuntime(5, fuse_wgrad=True)
    recipe = map_linear(assignment, history)
    assert not isinstance(recipe, str)
    te_linears = TeLinears({assignment.name: recipe}, runtime, engine.group)
    attach({assignment.name: made}, [assignment], runtime, te_linears)
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
    made, runtime = layer(engine, "nvfp4")
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
    made, runtime = layer(engine, "fp8_block")
    for index in (0, 1):
        micro_batch(made, runtime, index)
    runtime.end_step()
    with runtime.evaluating(), torch.no_grad():
        made(tensors()[0].view(4, 32, -1))
    runtime.begin_step(2, RECIPE)
    micro_batch(made, runtime, 0)
    assert engine.firsts == [True, False, None, True]


def test_bf16_phases_and_evaluations_pass_it_by(engine: StandIn) -> None:
    made, runtime = layer(engine, "fp8_block")
    with runtime.evaluating(bf16=True), torch.no_grad():
        made(tensors()[0].view(4, 32, -1))
    runtime.begin_step(2, Passes("bf16", "bf16"))
    micro_batch(made, runtime, 0)
    assert engine.firsts == []
    runtime.check_observed([precision("fp8_block")], Passes("bf16", "bf16"))


def test_histories_move_on_once_a_micro_batch(engine: StandIn) -> None:
    """The outermost autocast is what moves Transformer Engine's histories: one a micro-batch, not one a linear."""
    made, runtime = layer(engine, "fp8_delayed")
    assert runtime.histories is None
    for index in (0, 1):
        runtime.begin_microbatch(index)
        assert len(engine.recipes) == 1
    micro_batch(made, runtime, 2)
    assert len(engine.recipes) == 1
    runtime.end_step()
    assert engine.recipes == []
    assert engine.entered == 4  # three micro-batches and one linear


def meta(made: Any) -> list[Tensor]:
    states = made.transformer_engine._linear.fp8_meta
    return [tensor for key in ("scaling_fwd", "scaling_bwd") for tensor in vars(states[key]).values()]


def test_histories_go_on_where_they_were_saved(engine: StandIn) -> None:
    """Scales too: the last one follows an entry that the history, as short as this, has lost."""
    made, runtime = layer(engine, "fp8_delayed", history=4)
    made.transformer_engine._state("scaling_fwd").amax_history[0] = torch.tensor([9.0, 5.0, 0.0])
    for amax in (1.0, 2.0, 3.0, 0.0):
        for key, largest in (("scaling_fwd", 448.0), ("scaling_bwd", 57344.0)):
            state = made.transformer_engine._state(key)
            state.move_on(largest)
            state.amax_history[0, :2] = torch.tensor([amax, 2 * amax])
    saved = runtime.state_dict()
    assert {name: saved[f"layer.{name}"].tolist() for name in ("input", "weight", "gradient")} == {
        "input": [0.0, 3.0, 2.0, 1.0],
        "weight": [0.0, 6.0, 4.0, 2.0],
        "gradient": [0.0, 3.0, 2.0, 1.0],
    }
    again, other = layer(engine, "fp8_delayed", history=4)
    assert other.load_state_dict(saved) == []
    for found, expected in zip(meta(again), meta(made), strict=True):
        assert torch.equal(found[..., :1], expected[..., :1])
    assert torch.equal(meta(again)[0][:, 1], meta(made)[0][:, 1])
    assert torch.equal(meta(again)[1][:2], meta(made)[1][:2])
    assert layer(engine, "fp8_block")[1].state_dict() == {}


def test_histories_of_our_own_gemms_are_taken_over(engine: StandIn) -> None:
    made, runtime = layer(engine, "fp8_delayed", history=4)
    missing = runtime.load_state_dict({"layer.input": torch.tensor([7.0, 2.0]), "layer.gradient": torch.zeros(9)})
    assert missing == ["layer.weight"]
    history, scale, _, backward_scale = meta(made)
    assert history[:, 0].tolist() == [7.0, 0.0, 0.0, 2.0]
    assert (scale[0].item(), scale[1].item(), backward_scale[0].item()) == (64.0, 1.0, 1.0)


def test_an_evaluation_enters_no_amax(engine: StandIn) -> None:
    made, runtime = layer(engine, "fp8_delayed")
    made.transformer_engine._state("scaling_fwd")
    micro_batch(made, runtime, 0)
    before = [tensor.clone() for tensor in meta(made)]
    assert before[0][0, 0] > 0
    with runtime.evaluating(), torch.no_grad():
        made(100 * tensors()[0].view(4, 32, -1))
    assert all(torch.equal(*pair) for pair in zip(meta(made), before, strict=True))


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
