"""A linear's three GEMMs by Transformer Engine, on the layer's own parameters.

A `transformer_engine.pytorch.Linear` works for the layer without being a part of it: it borrows the weight, so that
names, sharding and checkpoints are Megatron's as in every other backend, and communication stays with the layer. It
adds weight gradients to `main_grad` in FP32, and keeps the quantized weight for a step.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.precision.assignment import LinearPrecision
from nvfp4_train.precision.backends import TransformerEngine
from nvfp4_train.precision.runtime import NOT_NEEDED, Call, PrecisionRuntime
from nvfp4_train.precision.te_recipes import TeRecipe, build

_PACKAGE = "transformer-engine"


def find_transformer_engine() -> TransformerEngine:
    """What is installed, and the original cause where it cannot be imported."""
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return TransformerEngine(None, None)
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # it loads libraries of several packages, which fail in their own ways
        return TransformerEngine(version, "; caused by ".join(_causes(error)))
    return TransformerEngine(version, None)


def _causes(error: BaseException | None) -> list[str]:
    """An exception and what it came from, one line each."""
    found = []
    while error is not None:
        first_line = (str(error).splitlines() or [""])[0]
        found.append(f"{type(error).__name__}: {first_line}")
        error = error.__cause__ or error.__context__
    return list(dict.fromkeys(found))


class TeLinear:
    """Transformer Engine's linear for one layer.

    Args:
        precision: what the recipe decided for the linear.
        weight: the layer's parameter [out, in], FP32, with a `main_grad` when it trains.
        recipe: a recipe object of `transformer_engine.common.recipe`.
        runtime: shared by all linears of the process.
        te: the module `transformer_engine.pytorch`.
    """

    def __init__(
        self, precision: LinearPrecision, weight: torch.nn.Parameter, recipe: Any, runtime: PrecisionRuntime, te: Any
    ) -> None:
        self._name, self._formats = precision.name, precision.gemm_formats
        self._recipe, self._runtime, self._te = recipe, runtime, te
        outputs, inputs = weight.shape
        self._linear = te.Linear(
            inputs, outputs, bias=False, params_dtype=weight.dtype, device="meta", fuse_wgrad_accumulation=True
        )
        self._linear.register_parameter("weight", weight)
        # It would refuse BF16 inputs of an FP32 weight, unless it has seen the type before.
        self._linear.activation_dtype = torch.bfloat16
        self._quantized: tuple[int, int, int] | None = None

    def __call__(self, x: Tensor, call: Call) -> Tensor:
        """Y = X W^T of x [..., in] BF16, and its backward pass."""
        weight = self._linear.weight
        assert not torch.is_grad_enabled() or hasattr(weight, "main_grad"), (
            f"{self._name}: Transformer Engine adds weight gradients to main_grad, and there is none"
        )
        with self._te.autocast(enabled=True, recipe=self._recipe):
            y = self._linear(x, is_first_microbatch=self._first(weight, call))
        if self._runtime.observing:
            self._record("fprop", call)
            if y.requires_grad:
                y.register_hook(partial(self._observe_backward, call, x.requires_grad))
        return y

    def _first(self, weight: Tensor, call: Call) -> bool | None:
        """Whether the weight is to be quantized anew and kept; None: quantized for this call alone.

        Transformer Engine starts a gradient where this is True, and adds to it elsewhere.
        """
        if call.evaluating:
            return None
        now = (self._runtime.epoch, weight._version, weight.data_ptr())
        first, self._quantized = now != self._quantized, now
        return first

    def _observe_backward(self, call: Call, needs_dx: bool, _: Tensor) -> None:
        self._record("dgrad", call, needs_dx)
        self._record("wgrad", call, self._linear.weight.requires_grad)

    def _record(self, gemm: str, call: Call, needed: bool = True) -> None:
        self._runtime.record(self._name, gemm, self._formats[gemm] if needed else NOT_NEEDED, call)


class TeLinears:
    """Makes the linears of a model, and keeps what they share.

    Args:
        recipes: name -> recipe of every linear that Transformer Engine runs.
        runtime: shared by all linears of the process.
    """

    def __init__(self, recipes: Mapping[str, TeRecipe], runtime: PrecisionRuntime) -> None:
        self._te = importlib.import_module("transformer_engine.pytorch")
        module = importlib.import_module("transformer_engine.common.recipe")
        built = {recipe: build(recipe, module) for recipe in set(recipes.values())}
        self._recipes = {name: built[recipe] for name, recipe in recipes.items()}
        self._runtime = runtime
        delayed = next((made for recipe, made in built.items() if recipe.cls == "DelayedScaling"), None)
        if delayed is not None:
            # Leaving the outermost autocast moves all histories on: once a micro-batch, not once a linear.
            runtime.microbatch_scope = partial(self._te.autocast, enabled=True, recipe=delayed)

    def make(self, precision: LinearPrecision, layer: torch.nn.Module) -> TeLinear | None:
        """The linear for a layer, None for one in plain BF16."""
        recipe = self._recipes.get(precision.name)
        if recipe is None:
            return None
        weight = layer.weight
        assert isinstance(weight, torch.nn.Parameter)
        return TeLinear(precision, weight, recipe, self._runtime, self._te)
