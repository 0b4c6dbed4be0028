"""Megatron's linear layers with our three GEMMs.

Megatron keeps what it is good at: parameters and their sharding, tensor and sequence parallelism, checkpoints. Its
layers hand each product to `_forward_impl`, which is the one method overridden here. `attach` tells every layer its
precision after the model is built; a layer that nobody told refuses to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from nvfp4_train.precision.delayed import AmaxHistories
from nvfp4_train.precision.keys import RandomOperand
from nvfp4_train.precision.runtime import NOT_NEEDED, Call, PrecisionRuntime
from nvfp4_train.precision.shards import WHOLE, Axis, Shard
from nvfp4_train.precision.three_gemms import Factor, ThreeGemms

if TYPE_CHECKING:
    from nvfp4_train.precision.assignment import LinearPrecision
    from nvfp4_train.precision.te_linear import TeLinear, TeLinears


# Name of a weight's attribute: its gradient buffer need not be zero when a step begins.
STARTS_ITS_GRADIENT = "starts_its_gradient"


class _QuantizedLinear(torch.autograd.Function):
    """Y = X W^T + bias, with the tensor- and sequence-parallel communication that Megatron expects."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gemms: ThreeGemms,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        trains: bool,
    ) -> Tensor:
        ctx.gemms, ctx.call = gemms, gemms.runtime.call()
        ctx.allreduce_dgrad, ctx.sequence_parallel, ctx.tp_group = allreduce_dgrad, sequence_parallel, tp_group
        full = _gathered(x, tp_group) if sequence_parallel else x
        y, kept = gemms.forward(_tokens(full), weight, bias, ctx.call, trains and not sequence_parallel)
        ctx.format = kept.format
        # Under sequence parallelism the shard is kept and gathered again: the whole would cost what the sharding saves.
        ctx.save_for_backward(weight, x if kept.format == "bf16" else kept.values, kept.scale)
        return y.view(*full.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, kept, scale = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        gemms, call = ctx.gemms, ctx.call
        dy_tokens = _tokens(dy)
        for gemm, needed in (("dgrad", needs_dx), ("wgrad", needs_dw)):
            if gemms.runtime.observing and not needed:
                gemms.runtime.record(gemms.name, gemm, NOT_NEEDED, call)
        for_dx, for_dw = gemms.gradients(dy_tokens, call, needs_dx, needs_dw)

        dx = dw = db = work = None
        if for_dx is not None:
            partial = gemms.input_gradient(for_dx, weight, call, len(dy_tokens))
            dx, work = _reduced(ctx, partial.view(*dy.shape[:-1], partial.shape[-1]))
        if for_dw is not None:  # while the reduction of dX is under way
            if ctx.format == "bf16":
                kept = _tokens(_gathered(kept, ctx.tp_group) if ctx.sequence_parallel else kept)
            dw = _weight_gradient(gemms, for_dw, weight, Factor(kept, scale, ctx.format), call)
        if needs_db:
            db = dy_tokens.float().sum(0)
        if work is not None:
            work.wait()
        return dx, dw, db, None, None, None, None, None


def _tokens(x: Tensor) -> Tensor:
    """[..., features] as contiguous [tokens, features]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _gathered(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The shards of all ranks of the group, put together along the first dimension (the sequence)."""
    full = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    dist.all_gather_into_tensor(full, x.contiguous(), group=group)
    return full


def _reduced(ctx: Any, partial: Tensor) -> tuple[Tensor, dist.Work | None]:
    """dX summed over tensor-parallel ranks where the layer asks for it; with sequence parallelism, this rank's part."""
    if ctx.sequence_parallel:
        shard = partial.new_empty((partial.shape[0] // dist.get_world_size(ctx.tp_group), *partial.shape[1:]))
        return shard, dist.reduce_scatter_tensor(shard, partial, group=ctx.tp_group, async_op=True)
    if ctx.allreduce_dgrad:
        return partial, dist.all_reduce(partial, group=ctx.tp_group, async_op=True)
    return partial, None


def _weight_gradient(gemms: ThreeGemms, gradient: Factor, weight: Tensor, kept: Factor, call: Call) -> Tensor:
    """dW for autograd; or, fused, dW added to Megatron's gradient buffer and a stand-in so that the buffer's hooks run.

    A step's first micro-batch writes over what the step before left, where nobody else has a share in the gradient.

    The stand-in's content is never read, unless the parameter is also used elsewhere (a tied embedding,
    `zero_out_wgrad`): then it is added to the buffer too, so it is zero.
    """
    if not (gemms.runtime.fuse_wgrad and hasattr(weight, "main_grad")):
        return gemms.weight_gradient(gradient, kept, call, add_to=None)
    start = call.first and getattr(weight, STARTS_ITS_GRADIENT, False)
    gemms.weight_gradient(gradient, kept, call, add_to=weight.main_grad, start=start)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


class _ThreeGemmMixin:
    """`_forward_impl` for both kinds of Megatron's linears."""

    gemms: ThreeGemms | None = None
    transformer_engine: TeLinear | None = None

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        grad_output_buffer: list[Tensor] | None,
        gtp_remat_size: int,
        wgrad_deferral_limit: int | None = None,
    ) -> Tensor:
        assert self.gemms is not None, f"{type(self).__name__} has no precision: call attach() after building the model"
        assert not gradient_accumulation_fusion, (
            "gradient fusion is the runtime's (fuse_wgrad), not Megatron's extension"
        )
        assert grad_output_buffer is None, "deferred embedding gradients are not supported"
        assert gtp_remat_size == 1, "rematerialized weights are not supported"
        assert input.dtype == torch.bfloat16, f"{self.gemms.name}: activations are BF16, got {input.dtype}"
        assert weight.dtype == torch.float32, f"{self.gemms.name}: weights are FP32, got {weight.dtype}"
        if self.transformer_engine is not None:
            call = self.gemms.runtime.call()
            if "recipe" in call.passes:
                return self._by_transformer_engine(input, bias, call, allreduce_dgrad, sequence_parallel, tp_group)
        trains = torch.is_grad_enabled() and weight.requires_grad  # no backward pass follows recompute's first forward
        return _QuantizedLinear.apply(
            input, weight, bias, self.gemms, allreduce_dgrad, sequence_parallel, tp_group, trains
        )

    def _by_transformer_engine(
        self,
        x: Tensor,
        bias: Tensor | None,
        call: Call,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
    ) -> Tensor:
        assert self.transformer_engine is not None
        if sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=tp_group)
        elif allreduce_dgrad:
            x = copy_to_tensor_model_parallel_region(x, group=tp_group)
        y = self.transformer_engine(x, call)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        """Megatron's line, and the format of each GEMM."""
        formats = {} if self.gemms is None else self.gemms.formats
        words = ", ".join(f"{gemm}={name}" for gemm, name in formats.items()) or "unattached"
        return f"{super().extra_repr()}, {words}"  # type: ignore[misc]


class QuantizedColumnParallelLinear(_ThreeGemmMixin, ColumnParallelLinear):
    """ColumnParallelLinear whose GEMMs run as its precision says. Input and output BF16, weight FP32."""


class QuantizedRowParallelLinear(_ThreeGemmMixin, RowParallelLinear):
    """RowParallelLinear whose GEMMs run as its precision says. Input and output BF16, weight FP32."""


def attach(
    linears: Mapping[str, torch.nn.Module],
    assignments: Iterable[LinearPrecision],
    runtime: PrecisionRuntime,
    te_linears: TeLinears | None = None,
) -> None:
    """Give every linear of this process its precision: once, after the model is built, before the first forward pass.

    Args:
        linears: global name -> module, all that this process holds.
        assignments: of all linears of the model, in any order.
        runtime: shared by all of them.
        te_linears: makes those that Transformer Engine runs.
    """
    by_name = {assignment.name: assignment for assignment in assignments}
    delayed: list[str] = []
    random: list[RandomOperand] = []
    for name, module in linears.items():
        assert isinstance(module, _ThreeGemmMixin), f"{name} is a {type(module).__name__}, not a quantized linear"
        assert name in by_name, f"no precision was assigned to {name}"
        precision = by_name[name]
        sizes = (module.input_size, module.output_size)
        assert sizes == (precision.in_features, precision.out_features), f"{name}: {sizes} is not what was assigned"
        module.gemms = ThreeGemms(precision, runtime, weight_shard(module))
        module.transformer_engine = None if te_linears is None else te_linears.make(precision, module)
        if module.transformer_engine is None:
            if module.weight is not None:
                setattr(module.weight, STARTS_ITS_GRADIENT, runtime.fuse_wgrad)
            delayed += module.gemms.delayed_tensors()
            random += module.gemms.random_operands()
    runtime.expect(linears)
    weights = [parameter for module in linears.values() for parameter in module.parameters()]
    device = weights[0].device if weights else torch.device("cpu")  # a tied output layer has none of its own
    if device.type == "cuda":
        runtime.read_keys_from(device, random)
    runtime.random_states = lambda: get_cuda_rng_tracker().states_
    if delayed:
        runtime.histories = AmaxHistories(delayed, runtime.amax_history, device)


def weight_shard(linear: ColumnParallelLinear | RowParallelLinear) -> Shard:
    """Which part of a linear's weight [out, in] this tensor-parallel rank holds.

    A column-parallel one shares the out-features, part by part where `weight.partition_sizes` says that several are
    packed (Mamba's in_proj: z, x, B, C and dt); a row-parallel one shares the in-features.
    """
    ranks, rank = linear.tp_group.size(), linear.tp_group.rank()
    if ranks == 1:
        return WHOLE
    if isinstance(linear, RowParallelLinear):
        local = linear.input_size_per_partition
        return Shard(columns=Axis(local * ranks, ((rank * local, local),), linear.tp_group))
    local = linear.output_size_per_partition
    pieces, start = [], 0
    for size in getattr(linear.weight, "partition_sizes", [local]):
        pieces.append((start + rank * size, size))
        start += size * ranks
    return Shard(rows=Axis(local * ranks, tuple(pieces), linear.tp_group))
