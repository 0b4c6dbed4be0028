"""What a run is made of before its first step: data, precision, model. Each says what it is, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from data.blending import Phase
from data.corpus import check_vocabulary
from data.loading import Datasets, build_datasets
from data.prepare import prepare
from data.record import FILE, to_record
from models.hybrid import describe_kernels, named_linears
from models.shapes import (
    STAGE_CUT,
    count_parameters,
    flops_per_token,
    linear_shapes,
    padded_vocab_size,
    stage_patterns,
)
from nvfp4_train.checkpoints.files import CheckpointError, Header
from nvfp4_train.chunks import build_chunks
from nvfp4_train.config import RunConfig
from nvfp4_train.devices import check_memory, fix_order_of_sums
from nvfp4_train.distributed import World, gather, largest_over_stage, stage_group
from nvfp4_train.gradients import finish_gradients
from nvfp4_train.layout import choose_backend, phase_steps, tokens_per_step
from nvfp4_train.precision.assignment import LinearPrecision, assign
from nvfp4_train.precision.backends import Backend
from nvfp4_train.precision.linear import attach
from nvfp4_train.precision.operands import without_kernel
from nvfp4_train.precision.phases import PassSchedule, resolve
from nvfp4_train.precision.report import report, summary
from nvfp4_train.precision.runtime import PrecisionRuntime
from nvfp4_train.precision.selftest import self_test, self_test_transformer_engine
from nvfp4_train.precision.shards import Axis
from nvfp4_train.precision.te_linear import TeLinears
from nvfp4_train.precision.te_recipes import map_linears
from nvfp4_train.storage import write_atomic

Say = Callable[[str], None]


@dataclass(frozen=True)
class QuantizedModel:
    """A model whose linears know their precision.

    Attributes:
        chunks: this rank's share, one or one for each virtual stage, with its initial weights; FP32 parameters.
        runtime: what its linears share.
        assignments: what was decided for every linear of the whole model.
        passes: which passes run in the recipe at which step.
        report: the precision report, for `precision.json`.
        backend: who multiplies.
    """

    chunks: list[Any]
    runtime: PrecisionRuntime
    assignments: tuple[LinearPrecision, ...]
    passes: PassSchedule
    report: dict[str, Any]
    backend: Backend


def open_datasets(config: RunConfig, say: Say, start: Header | None = None, *, resumed: bool = False) -> Datasets:
    """The run's corpora, prepared where they are new, checked against the vocabulary.

    Args:
        start: of the checkpoint that the run goes on from; only a branch's samples differ from steps * global batch.
        resumed: whether it is this run's own, so that text and tokenizer must be the same.
    """
    data, step, samples = config.data, 0 if start is None else start.step, 0 if start is None else start.samples
    corpora = [prepare(data.of_source(source), say=say) for source in data.blended()]
    for corpus in corpora:
        check_vocabulary(corpus, config.model.vocab_size)
    starts = [max(0, samples + (begin - step) * data.global_batch) for begin in phase_steps(config)]
    datasets = build_datasets(
        corpora,
        data,
        seed=config.seed,
        train_samples=samples + max(1, config.steps - step) * config.data.global_batch,
        validation_samples=config.evaluation.sequences,
        phases=[Phase(begin, phase.weights) for begin, phase in zip(starts, data.phases, strict=True)],
    )
    if start is not None:
        check_same_data(start, datasets, whole=resumed)
    for line in datasets.describe():
        say(line)
    return datasets


def write_data_record(run: Path, datasets: Datasets, global_batch: int, step: int, samples: int) -> None:
    """`data.json` in the run's folder: what it reads on from `samples` samples after `step` steps."""
    record = to_record(datasets, global_batch=global_batch, step=step, samples=samples)
    write_atomic(run / FILE, json.dumps(record, indent=1) + "\n")


def check_same_data(header: Header, datasets: Datasets, *, whole: bool) -> None:
    """Refuses data that a checkpoint was not trained on: another tokenizer's, and with `whole` another corpus's too.

    Raises:
        CheckpointError: names what differs, and the way out.
    """
    now = datasets.identity
    before = now if header.data is None else header.data
    differing = [name for name in (now if whole else ("tokenizer",)) if before.get(name) != now[name]]
    if differing:
        listing = ", ".join(f"{name} {str(before.get(name))[:12]} there, {now[name][:12]} here" for name in differing)
        raise CheckpointError(
            f"the checkpoint of step {header.step} was trained on other data: {listing}. Give it the text and the "
            "tokenizer that it was trained on, as they were; a branch (resume=PATH in another run_dir) may read other "
            "text of the same tokenizer."
        )


def build_quantized_model(config: RunConfig, world: World, say: Say) -> QuantizedModel:
    """The model of `config` in its precision, set to sum its loss over tokens; `gradients` divides, once a step."""
    parallel = config.parallel
    order = fix_order_of_sums(config.deterministic, world.device)
    flops = flops_per_token(config.model, config.data.sequence_length).training
    passes = resolve(config.precision.phases, config.steps, tokens_per_step(config))
    assignments = assign(config.precision, linear_shapes(config.model), parallel.tensor)
    backend = choose_backend(config, compute_capability(world.device))
    check_memory(config, assignments, backend.name, world.device)
    native = backend.name == "native"
    runtime = PrecisionRuntime(
        config.seed,
        fuse_wgrad=config.optimizer.fuse_wgrad,
        amax_history=config.precision.amax_history,
        native=native,
        gemm=config.precision.gemm,
    )
    runtime.amax_reduce = largest_over_stage
    runtime.token_axis = token_axis
    tested = self_test(assignments, world.device, native, config.precision.gemm)
    chunks = build_chunks(config, world.device)
    te_linears = None
    if backend.name == "transformer_engine":
        recipes = map_linears(config.precision, assignments).recipes
        self_test_transformer_engine(assignments, recipes, world.device, stage_group())
        te_linears = TeLinears(recipes, runtime, stage_group())
    linears = {name: linear for chunk in chunks for name, linear in named_linears(chunk).items()}
    attach(linears, assignments, runtime, te_linears)
    for chunk in chunks:
        chunk.config.calculate_per_token_loss = True
        chunk.config.finalize_model_grads_func = finish_gradients
    full_report = report(config.precision, assignments, flops, passes, backend.name)
    padded = padded_vocab_size(config.model)
    say(
        f"model {config.model.pattern}: {count_parameters(config.model):,} parameters, "
        f"vocabulary {config.model.vocab_size} padded to {padded}"
    )
    kernels = {line for lines in gather([describe_kernels(chunk) for chunk in chunks], world) for line in chain(*lines)}
    tokens = config.data.micro_batch * config.data.sequence_length // parallel.context
    slow = without_kernel(assignments, tokens) if world.device.type == "cuda" else []
    for line in (*describe_layout(config, world), order, *sorted(kernels), *slow, *summary(full_report)):
        if line:
            say(line)
    combinations = "1 combination" if tested == 1 else f"{tested} combinations"
    say(f"start-up test passed: {combinations} of formats, all three GEMMs, on {device_name(world.device)}")
    return QuantizedModel(chunks, runtime, assignments, passes, full_report, backend)


def token_axis(tokens: int) -> Axis | None:
    """Where the `tokens` of a context rank lie among all of a micro-batch: in the order [sequence, micro-batch], an
    early and a late piece of equal length (`models.attention.positions_of_rank`).
    """
    group = parallel_state.get_context_parallel_group()
    ranks, rank, piece = group.size(), group.rank(), tokens // 2
    if ranks == 1:
        return None
    return Axis(tokens * ranks, ((rank * piece, piece), ((2 * ranks - 1 - rank) * piece, piece)), group)


def describe_layout(config: RunConfig, world: World) -> list[str]:
    """Lines that say how the run lies on its processes, and which blocks each pipeline stage has; none for one."""
    parallel = config.parallel
    if world.size == 1:
        return []
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context}
    split = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"
    beside = ", sequence parallel" if parallel.sequence else ""
    lines = [f"layout: {world.size} processes, {world.data_size} replicas of {split}{beside}"]
    pipeline, virtual = parallel.pipeline, parallel.virtual_pipeline
    if pipeline == 1:
        return lines
    stages = " | ".join(stage_patterns(config.model, pipeline, virtual))
    how = "cut as the pattern says" if STAGE_CUT in config.model.pattern else "cut evenly: the pattern has no '|'"
    turns = f", in turn on {pipeline} ranks" if virtual > 1 else ""
    return [*lines, f"pipeline: {stages}{turns} ({how})"]


def device_name(device: torch.device) -> str:
    """`NVIDIA H200` or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Of a CUDA device, None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
