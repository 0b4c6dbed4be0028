"""What all quantized linears of a process share: where the run is, what is in force, and what was seen.

    runtime.begin_step(step, passes)
    for each micro-batch, in whatever order a pipeline runs them:
        runtime.begin_microbatch(global index); forward pass; backward pass
    optimizer step; runtime.weights_changed()
    runtime.end_step(skipped)

A forward pass takes down its place in the run (`Call`) and its backward pass uses it, however many other
micro-batches began in between. Activation recompute runs a forward pass again, later, when another micro-batch may be
current. It must draw the same random bits. So the micro-batch's index is kept where Megatron keeps its random states:
the position in our random stream IS a random state, and Megatron's checkpointing restores all of them before it
recomputes, and puts back the current ones after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nvfp4_train.precision.assignment import LinearPrecision
from nvfp4_train.precision.config import PrecisionError
from nvfp4_train.precision.delayed import AmaxHistories
from nvfp4_train.precision.health import HealthSample
from nvfp4_train.precision.keys import DeviceKeys, RandomOperand
from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.shards import Axis
from nvfp4_train.precision.validation import GEMMS

MICROBATCH_STATE = "nvfp4_train.microbatch"
NOT_NEEDED = "not needed"


class Call(NamedTuple):
    """One forward pass of a micro-batch; kept for its backward pass.

    Attributes:
        step: as `begin_step` was told; None in evaluation.
        microbatch: counted from 0 over the step's whole global batch; None in evaluation.
        passes: which of the recipe's passes are in force.
        sampled: whether quantization health is measured on it.
        first: whether it is the first of its step in this process: its weight gradients may start a sum.
        keys: of its random bits, on the GPU where kernels read them; None where numbers do.
    """

    step: int | None
    microbatch: int | None
    passes: Passes
    sampled: bool
    first: bool
    keys: DeviceKeys | None = None

    @property
    def evaluating(self) -> bool:
        return self.microbatch is None


class KeepsHistories(Protocol):
    """Whoever has amax histories to save."""

    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> list[str]: ...


class PrecisionRuntime:
    """See the module's docstring for the order of calls.

    Args:
        seed: of the random bits.
        fuse_wgrad: add weight gradients straight into `weight.main_grad` where a parameter has one.
        cache_weights: quantize weights once per step; off, at every use (same numbers, for tests).
        amax_history: steps that delayed scaling looks back.
        native: FP8 GEMMs run on FP8 tensor cores.
        gemm: how the others are emulated, see `PrecisionConfig`.

    Attributes:
        sample_health: set it before a step to measure quantization health on the step's first micro-batch.
        amax_reduce: takes FP32 amaxes to their maximum over ranks, in place; None with one rank. It sees the amaxes
            of delayed scaling, once a step and all together, so every rank of its group must hold the same linears.
        engine: the linears of Transformer Engine, which has amax histories of its own; None without it.
        token_axis: where the given number of tokens of this rank lie in the micro-batch; None where they are all of it.
        microbatch_scope: makes a context that is entered for each micro-batch, until the next one or the step's end.
        random_states: the mapping in which activation recompute saves and restores random states; `attach` points it
            to Megatron's.
    """

    def __init__(
        self,
        seed: int,
        *,
        fuse_wgrad: bool = False,
        cache_weights: bool = True,
        amax_history: int = 1024,
        native: bool = False,
        gemm: str = "exact",
    ) -> None:
        assert gemm in GEMMS, gemm
        self.seed = seed
        self.native = native
        self.gemm = gemm
        self.fuse_wgrad = fuse_wgrad
        self.cache_weights = cache_weights
        self.amax_history = amax_history
        self.sample_health = False
        self.amax_reduce: Callable[[Tensor], None] | None = None
        self.token_axis: Callable[[int], Axis | None] = lambda tokens: None
        self.health = HealthSample()
        self.histories: AmaxHistories | None = None
        self.engine: KeepsHistories | None = None
        self.microbatch_scope: Callable[[], AbstractContextManager[Any]] | None = None
        self._scope = ExitStack()
        self.epoch = 0
        self.observing = False
        self.step: int | None = None
        self.passes = Passes()
        own_states: dict[str, Any] = {}
        self.random_states: Callable[[], MutableMapping[str, Any]] = lambda: own_states
        self._new_keys: Callable[[], DeviceKeys] | None = None
        self._keys: dict[int, DeviceKeys] = {}
        self._evaluation: Passes | None = None
        self._first_microbatch: int | None = None
        self._began: set[int] = set()
        self._observed: dict[str, dict[str, dict[str, set[int]]]] = {}
        self._observed_passes: Passes | None = None

    # ---- the run's course

    def begin_step(self, step: int, passes: Passes) -> None:
        """A new optimizer step: its place in the random stream, the passes in force, fresh weights."""
        self.observing = passes != self._observed_passes  # the first step of the process and of each phase
        if self.observing:
            self._observed_passes = passes
            self._observed = {name: {} for name in self._observed}
            self._began = set()
        self.step = step
        self.passes = passes
        self._first_microbatch = None
        self._keys.clear()
        self.weights_changed()

    def read_keys_from(self, device: torch.device, operands: Sequence[RandomOperand]) -> None:
        """Kernels on a GPU read the keys of random bits from its memory; `operands` are all that they may ask for."""
        self._new_keys = lambda: DeviceKeys(operands, device)

    def new_keys(self) -> DeviceKeys | None:
        """Room for the keys of a micro-batch; None where no kernel reads them from memory."""
        return None if self._new_keys is None else self._new_keys()

    def begin_microbatch(self, index: int, keys: DeviceKeys | None = None) -> None:
        """The next forward pass is of this micro-batch, counted from 0 over the global batch of all ranks.

        Args:
            keys: where its keys are to lie; None makes new ones, since its backward pass may come after other
                micro-batches have begun.
        """
        assert self.step is not None, "begin_microbatch before begin_step"
        if self._first_microbatch is None:
            self._first_microbatch = index
        if self.observing:
            self._began.add(index)
        self.random_states()[MICROBATCH_STATE] = torch.tensor(index)
        keys = keys or self.new_keys()
        if keys is not None:
            keys.fill(self.seed, self.step, index)
            self._keys[index] = keys
        if self.microbatch_scope is not None:
            self._scope.close()
            self._scope.enter_context(self.microbatch_scope())

    def end_step(self, skipped: bool = False) -> None:
        """All forward and backward passes of the step are done: delayed scaling takes the step's amaxes over.

        A `skipped` step (gradients not finite, no update) leaves the histories as they were.
        """
        self._scope.close()
        if self.histories is not None:
            if skipped:
                self.histories.drop_step()
            else:
                self.histories.end_step(self.amax_reduce)
        self.random_states().pop(MICROBATCH_STATE, None)
        self.step = None

    def weights_changed(self) -> None:
        """Quantize weights anew at their next use: after an optimizer step, a loaded checkpoint, an edit of `.data`."""
        self.epoch += 1

    @contextmanager
    def evaluating(self, bf16: bool = False) -> Iterator[None]:
        """Forward passes that leave no trace: nearest rounding, no histories, counts or health; `bf16`: all in BF16."""
        before = self._evaluation
        self._evaluation = Passes(forward="bf16", backward="bf16") if bf16 else self.passes
        self.weights_changed()
        try:
            yield
        finally:
            self._evaluation = before

    def call(self) -> Call:
        """The forward pass that is being run."""
        if self._evaluation is not None:
            return Call(None, None, self._evaluation, sampled=False, first=False)
        state = self.random_states().get(MICROBATCH_STATE)
        assert state is not None, (
            "a quantized linear ran outside of a micro-batch: call begin_step and begin_microbatch before, "
            "or wrap what is no training in runtime.evaluating()"
        )
        microbatch = int(state)
        first = microbatch == self._first_microbatch
        return Call(self.step, microbatch, self.passes, self.sample_health and first, first, self._keys.get(microbatch))

    # ---- delayed scaling

    def delayed_amax(self, name: str) -> Tensor:
        """The amax to scale a tensor by, from the steps before: FP32 0-d, 0 (scaled by 1) before the first."""
        assert self.histories is not None
        return self.histories.amax(name)

    def record_amax(self, name: str, amax: Tensor, call: Call) -> None:
        """Take down a tensor's own amax for the steps to come."""
        assert self.histories is not None
        if not call.evaluating:
            self.histories.record(name, amax)

    def amax_entry(self, name: str, call: Call) -> Tensor | None:
        """Where a kernel takes down a tensor's own amax for the steps to come; None where nobody will ask for it."""
        assert self.histories is not None
        return None if call.evaluating else self.histories.entry(name)

    def state_dict(self) -> dict[str, Tensor]:
        """Amax histories, `<linear>.<input|weight|gradient>` -> FP32 [amax_history]; empty without delayed scaling."""
        return {name: saved for keeper in self._keepers() for name, saved in keeper.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> list[str]:
        """Take over what `state_dict` gave; call it after `attach`.

        Returns:
            Tensors that had no history in `state` and start anew.
        """
        self.weights_changed()
        return [name for keeper in self._keepers() for name in keeper.load_state_dict(state)]

    def _keepers(self) -> list[KeepsHistories]:
        return [keeper for keeper in (self.histories, self.engine) if keeper is not None]

    # ---- what really ran

    def expect(self, names: Iterable[str]) -> None:
        """These linears live in this process, so each must run in each micro-batch."""
        self._observed = {name: {} for name in names}

    def record(self, linear: str, gemm: str, ran: str, call: Call) -> None:
        """A GEMM ran in this format. Recompute says it again, which changes nothing."""
        if call.microbatch is not None:
            self._observed[linear].setdefault(gemm, {}).setdefault(ran, set()).add(call.microbatch)

    def observed(self) -> dict[str, dict[str, dict[str, int]]]:
        """linear -> gemm -> format -> micro-batches in which it ran, of the first step and the first of each phase."""
        return {
            linear: {gemm: {ran: len(where) for ran, where in formats.items()} for gemm, formats in gemms.items()}
            for linear, gemms in self._observed.items()
        }

    def check_observed(self, assignments: Iterable[LinearPrecision], passes: Passes) -> None:
        """Compare what was meant with what ran in the observed step; call it after that step.

        Args:
            assignments: `LinearPrecision` of every linear; those of other pipeline stages are passed over.
            passes: those of the observed step.

        Raises:
            PrecisionError: lists each linear and GEMM that ran in another format, or not in every micro-batch.
        """
        differences = []
        for assignment in assignments:
            if assignment.name not in self._observed:
                continue
            for gemm, recipe in assignment.gemm_formats.items():
                meant = recipe if (passes.forward if gemm == "fprop" else passes.backward) == "recipe" else "bf16"
                ran = {name: len(where) for name, where in self._observed[assignment.name].get(gemm, {}).items()}
                if ran not in ({meant: len(self._began)}, {NOT_NEEDED: len(self._began)}):
                    seen = " and ".join(f"{name} in {count}" for name, count in ran.items()) or "nothing"
                    differences.append(
                        f"{assignment.name} {gemm}: meant {meant}, ran {seen} of {len(self._began)} micro-batches"
                    )
        if differences:
            raise PrecisionError(
                f"{len(differences)} GEMMs did not run as the precision report says:\n  "
                + "\n  ".join(differences)
                + "\nEvery linear must be called through its module in every micro-batch, after begin_microbatch."
            )
