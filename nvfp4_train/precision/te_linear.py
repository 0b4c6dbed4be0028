"""A linear's three GEMMs by Transformer Engine, on the layer's own parameters.

A `transformer_engine.pytorch.Linear` works for the layer without being a part of it: it borrows the weight, so that
names, sharding and checkpoints are Megatron's as in every other backend, and communication stays with the layer. It
adds weight gradients to `main_grad` in FP32, and keeps the quantized weight for a step.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nvfp4_train.precision.assignment import LinearPrecision
from nvfp4_train.precision.backends import TransformerEngine
from nvfp4_train.precision.runtime import NOT_NEEDED, Call, PrecisionRuntime
from nvfp4_train.precision.te_recipes import TeRecipe, build

_PACKAGE = "transformer-engine"
# Where Transformer Engine keeps the amax histories of a linear: pass and column.
_HISTORIES = {"input": ("scaling_fwd", 0), "weight": ("scaling_fwd", 1), "gradient": ("scaling_bwd", 0)}
_LARGEST = {"scaling_fwd": "max_fwd", "scaling_bwd": "max_bwd"}


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
        autocast: makes the context in which `recipe` is in force.
    """

    def __init__(
        self,
        precision: LinearPrecision,
        weight: torch.nn.Parameter,
        recipe: Any,
        runtime: PrecisionRuntime,
        te: Any,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._name, self._formats = precision.name, precision.gemm_formats
        self._recipe, self._runtime, self._autocast = recipe, runtime, autocast
        self._delayed = precision.format == "fp8_delayed"
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
        with self._untouched_histories(call), self._autocast():
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

    @contextmanager
    def _untouched_histories(self, call: Call) -> Iterator[None]:
        """Evaluations leave no trace: Transformer Engine would enter their amaxes as those of the step to come."""
        if not (self._delayed and call.evaluating):
            yield
            return
        entry = self._state("scaling_fwd").amax_history[0]
        before = entry.clone()
        yield
        entry.copy_(before)

    # ---- amax histories

    def state_dict(self) -> dict[str, Tensor]:
        """With delayed scaling, histories as `AmaxHistories` has them, and the scales in force (FP32 [3], as
        `_HISTORIES` counts): these follow the entries that the last step pushed out, too.
        """
        if not self._delayed:
            return {}
        found, scales = {}, []
        for kind, (key, column) in _HISTORIES.items():
            state = self._state(key)
            # Row 0 is the step's own maximum, and the entries before it lie in the last row and upwards.
            rows = state.amax_history[:, column]
            found[f"{self._name}.{kind}"] = torch.cat([rows[:1], rows[1:].flip(0)])
            scales.append(state.scale[column])
        return {**found, f"{self._name}.scales": torch.stack(scales)}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> list[str]:
        """Take over what `state_dict` gave, or histories of our own GEMMs; returns the names that were not there."""
        if not self._delayed:
            return []
        for i, (kind, (key, column)) in enumerate(_HISTORIES.items()):
            history = saved.get(f"{self._name}.{kind}")
            if history is None:
                continue
            state = self._state(key)
            rows = state.amax_history[:, column]
            entries = torch.zeros_like(rows)
            entries[: len(history)].copy_(history[: len(rows)])
            rows.copy_(torch.cat([entries[:1], entries[1:].flip(0)]))
            scales, amax = saved.get(f"{self._name}.scales"), entries.amax()
            largest = getattr(self._recipe.fp8_format.value, _LARGEST[key])
            follow = torch.where(amax > 0, largest / amax, 1.0).clamp(max=torch.finfo(torch.float32).max)
            state.scale[column].copy_(follow if scales is None else scales[i])
        return [f"{self._name}.{kind}" for kind in _HISTORIES if f"{self._name}.{kind}" not in saved]

    def _state(self, key: str) -> Any:
        """Transformer Engine's own tensors, made at the first pass or, if these are wanted before, here."""
        if key not in self._linear.fp8_meta:
            self._linear.fp8_meta["num_gemms"] = 1
            self._linear.init_fp8_meta_tensors(self._recipe)
        return self._linear.fp8_meta[key]

    # ---- what ran

    def _observe_backward(self, call: Call, needs_dx: bool, _: Tensor) -> None:
        self._record("dgrad", call, needs_dx)
        self._record("wgrad", call, self._linear.weight.requires_grad)

    def _record(self, gemm: str, call: Call, needed: bool = True) -> None:
        self._runtime.record(self._name, gemm, self._formats[gemm] if needed else NOT_NEEDED, call)


class TeLinears:
    """Makes the linears of a model, and keeps what they share; their amax histories are the runtime's to save.

    Args:
        recipes: name -> recipe of every linear that Transformer Engine runs.
        runtime: shared by all linears of the process.
        group: ranks that hold the same linears, over which delayed scaling takes its amaxes to their maximum.
    """

    def __init__(
        self, recipes: Mapping[str, TeRecipe], runtime: PrecisionRuntime, group: dist.ProcessGroup | None = None
    ) -> None:
        self._te = importlib.import_module("transformer_engine.pytorch")
        module = importlib.import_module("transformer_engine.common.recipe")
        built = {recipe: build(recipe, module) for recipe in set(recipes.values())}
        self._recipes = {name: built[recipe] for name, recipe in recipes.items()}
        self._runtime, self._group = runtime, group
        self._made: list[TeLinear] = []
        runtime.engine = self
        delayed = next((made for recipe, made in built.items() if recipe.cls == "DelayedScaling"), None)
        if delayed is not None:
            # Leaving the outermost autocast moves all histories on: once a micro-batch, not once a linear.
            runtime.microbatch_scope = self._autocast(delayed)

    def _autocast(self, recipe: Any) -> Callable[[], AbstractContextManager[Any]]:
        return partial(self._te.autocast, enabled=True, recipe=recipe, amax_reduction_group=self._group)

    def make(self, precision: LinearPrecision, layer: torch.nn.Module) -> TeLinear | None:
        """The linear for a layer, None for one in plain BF16."""
        recipe = self._recipes.get(precision.name)
        if recipe is None:
            return None
        weight = layer.weight
        assert isinstance(weight, torch.nn.Parameter)
        made = TeLinear(precision, weight, recipe, self._runtime, self._te, self._autocast(recipe))
        self._made.append(made)
        return made

    def state_dict(self) -> dict[str, Tensor]:
        """Amax histories of all linears; see `TeLinear`."""
        return {name: saved for linear in self._made for name, saved in linear.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> list[str]:
        """Take them over; returns the names that were not there."""
        return [name for linear in self._made for name in linear.load_state_dict(state)]
