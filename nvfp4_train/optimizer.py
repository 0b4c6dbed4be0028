"""torch's AdamW, in Megatron's hands, over FP32 parameters: they are the master weights; gradients and both moments are
FP32 too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import megatron.core.optimizer
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from models.hybrid import no_weight_decay
from models.megatron_cpu import megatron_device
from nvfp4_train.config import OptimizerConfig, ParallelConfig


def wrap_data_parallel(chunks: Sequence[torch.nn.Module], parallel: ParallelConfig) -> list[DistributedDataParallel]:
    """Each chunk with one FP32 gradient buffer that is summed over data-parallel ranks: at the end of a step, or, where
    that is to overlap, bucket by bucket during the last micro-batch's backward pass.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    with megatron_device():
        # Buckets shorten what the first stage waits for; virtual stages after the first are not waited for.
        wrapped = [
            DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
    if parallel.overlap_grad_reduce:
        pauses = [chunk.no_sync for chunk in wrapped]
        for chunk in wrapped:
            chunk.config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]
    return wrapped


def gather_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """Wait until every rank has all weights; without `overlap_param_gather` they are there after each update."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def build_optimizer(
    config: OptimizerConfig, parallel: ParallelConfig, chunks: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """AdamW with decoupled weight decay for the parameters that take one.

    It is torch's, on a GPU with a kernel of our own, whatever else is installed that Megatron would prefer: one kind of
    state everywhere. Megatron's own clipping is off: `gradients` clips by a norm that is the same in every layout. The
    moments exist from the start, so that a checkpoint holds them even before the first update.
    """
    spared = ParamKey(with_name_predicate=ParamWithNamePredicate(name="no_weight_decay", fn=_takes_no_decay))
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=0.0,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=0.0,
        bf16=False,
        fp16=False,
        params_dtype=torch.float32,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    with megatron_device(), mock.patch.object(megatron.core.optimizer, "USING_PYTORCH_OPTIMIZER", True):
        optimizer = get_megatron_optimizer(settings, list(chunks), {spared: ParamGroupOverride(wd_mult=0.0)})
    if on_gpu(chunks):
        from nvfp4_train.fused_adam import FusedAdamW

        for inner in inner_optimizers(optimizer):
            inner.__class__ = FusedAdamW
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
        del (
            group["max_lr"],
            group["min_lr"],
        )  # of Megatron's schedule, not ours
    _ensure_moments(optimizer)
    return optimizer


def _takes_no_decay(parameter: torch.nn.Parameter, name: str) -> bool:
    return no_weight_decay(name.removeprefix("module."), parameter)


def _ensure_moments(optimizer: MegatronOptimizer) -> None:
    """Give every parameter that has no optimizer state yet zero moments and step 0, as AdamW's first step would."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                state.setdefault("exp_avg", torch.zeros_like(parameter))
                state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
                state["step"] = state.get("step", torch.tensor(0.0)).cpu()


def inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.AdamW]:
    """torch's optimizers inside Megatron's."""
    for part in _parts(optimizer):
        assert isinstance(part.optimizer, torch.optim.AdamW), type(part.optimizer).__name__
        yield part.optimizer


def sharded_parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The distributed optimizers inside Megatron's; none where each replica updates all of its parameters."""
    return [part for part in _parts(optimizer) if isinstance(part, DistributedOptimizer)]


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron's optimizer for each kind of parameters, or the one that there is."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def updated_here(optimizer: MegatronOptimizer) -> dict[torch.nn.Parameter, tuple[int, int]] | None:
    """First element and the one after the last of each flat parameter that this rank updates, None for all of all."""
    parts = sharded_parts(optimizer)
    if not parts:
        return None
    ranges = {
        parameter: part._get_model_param_range_map(parameter)["param"]
        for part in parts
        for parameter in part.model_param_gbuf_map
    }
    return {parameter: (found.start, found.end) for parameter, found in ranges.items()}


def on_gpu(chunks: Sequence[DistributedDataParallel]) -> bool:
    """Whether parameters and gradients are there."""
    return bool(chunks[0].buffers[0].grad_data.is_cuda)


def update(optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel], factor: torch.Tensor) -> None:
    """One step with the gradients in the buffers times `factor`. Megatron's `step` would take their norm once more.

    On a GPU the step is launched whatever the factor will be, and AdamW takes it in while it reads the gradients;
    elsewhere a pass over them comes first. Where the factor is NaN weights, moments and gradients stay as they are;
    whoever has learned of that must call `take_back`.

    Args:
        factor: FP64 [] where the gradients are.
    """
    if on_gpu(chunks):
        for inner in inner_optimizers(optimizer):
            inner.factor = factor  # type: ignore[attr-defined]
    elif factor.isnan():
        return
    else:
        for chunk in chunks:
            chunk.scale_gradients(float(factor))
    with megatron_device():
        optimizer.prepare_grads()
        optimizer.step_with_ready_grads()
        optimizer.zero_grad()  # of what Megatron lent to the optimizer: passes add to it where it is still there


def take_back(optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel]) -> None:
    """The last update's factor was NaN: on a GPU it was counted all the same."""
    if on_gpu(chunks):
        for inner in inner_optimizers(optimizer):
            inner.uncount()  # type: ignore[attr-defined]


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    """One learning rate for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def describe_groups(chunks: Sequence[torch.nn.Module], weight_decay: float) -> str:
    """One line: how many of this rank's parameters decay, how many don't, and which kinds these are."""
    decayed, spared, kinds = 0, 0, set()
    for name, parameter in (named for chunk in chunks for named in chunk.named_parameters()):
        if no_weight_decay(name, parameter):
            spared += parameter.numel()
            kinds.add(_kind(name))
        else:
            decayed += parameter.numel()
    return f"weight decay {weight_decay:g} on {decayed:,} parameters, none on {spared:,} ({', '.join(sorted(kinds))})"


def _kind(name: str) -> str:
    """`norm` for any norm's weight, otherwise the last part of the name, such as `A_log`."""
    parent, _, last = name.rpartition(".")
    return "norm" if "norm" in parent else last
