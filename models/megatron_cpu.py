"""What Megatron-Core asks of a CUDA device, answered on a machine without one.

Nothing here changes where CUDA exists. On a CPU, a random-state tracker that keeps CPU generator states stands in for
Megatron's, and, only inside `megatron_device()`, a few queries about the device are answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _NullStream:
    """A stream of a machine that has none: work is done when the call returns."""

    def wait_stream(self, *_: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, *_: Any) -> None:
        """Nothing to wait for."""


class _CudaMeansCpu(TorchFunctionMode):
    """Reads the device `cuda` as `cpu`, and names tensor types as the optimizer's assertions expect them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """Context for every Megatron call that assumes CUDA: building, schedules, optimizer steps, checkpoints.

    Activation recompute runs inside it too: the device's random state is empty there, and the CPU generator and the
    tracker are saved and restored by Megatron itself. Does nothing where CUDA exists; may be nested.
    """
    if torch.cuda.is_available():
        yield
        return
    queries: dict[str, Any] = {
        "current_device": lambda: CPU,
        "current_stream": lambda *_: _NullStream(),
        "synchronize": lambda *_: None,
    }
    random_state: dict[str, Any] = {
        "_get_cuda_rng_state": lambda *_, **__: torch.empty(0, dtype=torch.uint8),
        "_set_cuda_rng_state": lambda *_, **__: None,
    }
    with (
        mock.patch.multiple(torch.cuda, **queries),
        mock.patch.multiple(megatron_random, **random_state),
        _CudaMeansCpu(),
    ):
        yield


class CpuRngStatesTracker(megatron_random.CudaRNGStatesTracker):
    """Megatron's tracker of named random states, with the states of the CPU's generator."""

    def add(self, name: str, seed: int) -> None:
        """Start the state `name` from `seed`; both must be new."""
        assert seed not in self.seeds_, f"seed {seed} is taken"
        assert name not in self.states_, f"random state {name} exists"
        self._is_initialized = True
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw from the state `name` inside the context, then go on with the surrounding one."""
        assert name in self.states_, f"random state {name} was not added"
        surrounding = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(surrounding)


def install_cpu_rng() -> None:
    """Put the CPU tracker in place, before `model_parallel_cuda_manual_seed`. Nothing where CUDA exists."""
    if torch.cuda.is_available():
        return
    megatron_random._CUDA_RNG_STATE_TRACKER = CpuRngStatesTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
