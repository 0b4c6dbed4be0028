"""What several values must agree on before anything heavy starts: layout, batch, model, precision. No torch here."""

from __future__ import annotations

from pathlib import Path

from models.shapes import linear_shapes, validate
from nvfp4_train.config import ConfigError, ParallelConfig, RunConfig
from nvfp4_train.duration import duration_of
from nvfp4_train.precision import backends
from nvfp4_train.precision.assignment import assign
from nvfp4_train.precision.backends import Backend
from nvfp4_train.precision.config import PrecisionError
from nvfp4_train.precision.phases import check_something_runs, resolve
from nvfp4_train.schedule import build_schedule

# What is refused by name, with the one value that is there.
NOT_YET = {"expert": 1}
CUDA_GRAPHS = ("auto", "always", "never")


def phase_steps(config: RunConfig) -> list[int]:
    """The steps after which the blend changes, one for each of `data.phases`.

    Raises ConfigError for phases that are out of order or begin when the run is over.
    """
    steps: list[int] = []
    for index, phase in enumerate(config.data.phases):
        start = duration_of(f"data.phases[{index}].start", phase.start).steps(config.steps, tokens_per_step(config))
        if not (steps[-1] if steps else 0) < start < config.steps:
            raise ConfigError(
                f"data.phases: start={phase.start} is after step {start} of {config.steps}"
                f"{f', the one before it starts after step {steps[-1]}' if steps else ''}. Name the phases in order, "
                "each within the run; the weights of data.sources hold until the first."
            )
        steps.append(start)
    return steps


def check_data(config: RunConfig) -> None:
    """Refuses what is for `prepare` alone, and sources or phases that make no blend; DataError or ConfigError."""
    for key, value in {"tokenizer.train": config.tokenizer.train, "shard": config.shard}.items():
        if value is not None:
            raise ConfigError(f"{key}={value}: is for `python -m nvfp4_train.prepare` alone. Leave it out here.")
    config.data.blended()  # raises where they make no blend
    phase_steps(config)


def tokens_per_step(config: RunConfig) -> int:
    """Tokens of a global batch."""
    return config.data.global_batch * config.data.sequence_length


def check_run(config: RunConfig, world_size: int = 1) -> None:
    """Refuses a run that can't be trained as it is configured.

    Raises ConfigError, ModelError or PrecisionError: what does not fit, all sizes involved, the nearest values that do.
    """
    parallel, data = config.parallel, config.data
    check_supported(parallel)  # before sizes are blamed that more processes would mend
    check_layout(config, world_size)
    check_data(config)
    validate(
        config.model,
        parallel.tensor,
        parallel.pipeline,
        parallel.sequence,
        parallel.context,
        virtual_pipeline=parallel.virtual_pipeline,
        sequence_length=data.sequence_length,
        micro_batch=data.micro_batch,
    )
    assignments = assign(config.precision, linear_shapes(config.model), parallel.tensor)
    phases = resolve(config.precision.phases, config.steps, tokens_per_step(config))
    check_something_runs(phases, assignments, config.precision.name)
    build_schedule(config.schedule, config.optimizer, config.steps, tokens_per_step(config))
    if config.baseline is not None and not (Path(config.baseline) / "metrics.jsonl").is_file():
        raise ConfigError(f"baseline={config.baseline}: there is no metrics.jsonl in there. Name the folder of a run.")


def model_ranks(parallel: ParallelConfig) -> int:
    """Ranks that hold one copy of the model."""
    return parallel.tensor * parallel.pipeline * parallel.context


def check_layout(config: RunConfig, world_size: int) -> None:
    """World size against the model's split, then the batches against replicas; ConfigError with all sizes."""
    parallel, data = config.parallel, config.data
    ranks = model_ranks(parallel)
    split = f"parallel.tensor={parallel.tensor} * pipeline={parallel.pipeline} * context={parallel.context} = {ranks}"
    sizes = (
        f"world size {world_size}, {split}, data.global_batch={data.global_batch}, data.micro_batch={data.micro_batch}"
    )
    if world_size % ranks:
        nearest = _around(world_size, ranks)
        raise ConfigError(
            f"{sizes}: the number of processes is no multiple of the {ranks} that hold one copy of the model. Start "
            f"{nearest} processes (python -m launch.run --processes N; plan: --world N), or split the model over "
            f"{_divisors_near(world_size, ranks)}."
        )
    replicas = world_size // ranks
    step = data.micro_batch * replicas
    if data.global_batch % step:
        share = data.global_batch / replicas
        fitting = _divisors_near(data.global_batch // replicas, data.micro_batch) if share == int(share) else None
        other = f", or data.micro_batch={fitting}" if fitting else ""
        raise ConfigError(
            f"{sizes}, data parallel {replicas}: the global batch is no multiple of {data.micro_batch} * {replicas} = "
            f"{step}. Write data.global_batch={_around(data.global_batch, step)}{other}."
        )
    _check_micro_batches(config, replicas)


def _check_micro_batches(config: RunConfig, replicas: int) -> None:
    """Interleaved stages take turns with as many micro-batches as there are pipeline ranks."""
    parallel, data = config.parallel, config.data
    count = data.global_batch // (data.micro_batch * replicas)
    if parallel.virtual_pipeline > 1 and count % parallel.pipeline:
        step = data.micro_batch * replicas * parallel.pipeline
        raise ConfigError(
            f"data.global_batch={data.global_batch}, data.micro_batch={data.micro_batch} and data parallel {replicas} "
            f"make {count} micro-batches a step, and parallel.virtual_pipeline={parallel.virtual_pipeline} needs a "
            f"multiple of parallel.pipeline={parallel.pipeline}. Write data.global_batch="
            f"{_around(data.global_batch, step)}."
        )


def _around(value: int, multiple: int) -> str:
    lower = value // multiple * multiple
    return f"{lower} or {lower + multiple}" if lower else str(multiple)


def _divisors_near(value: int, wanted: int) -> str:
    """The divisors of `value` on both sides of `wanted`."""
    divisors = [number for number in range(1, value + 1) if value % number == 0]
    below = [number for number in divisors if number < wanted][-1:]
    above = [number for number in divisors if number > wanted][:1]
    return " or ".join(map(str, below + above))


def check_supported(parallel: ParallelConfig) -> None:
    """Refuses by name what training does not have yet, and settings that need others."""
    for name, value in NOT_YET.items():
        if getattr(parallel, name) != value:
            written = str(getattr(parallel, name)).lower()
            raise ConfigError(f"parallel.{name}={written}: not there yet. Write parallel.{name}={str(value).lower()}.")
    if parallel.cuda_graphs not in CUDA_GRAPHS:
        raise ConfigError(f"parallel.cuda_graphs={parallel.cuda_graphs}: write one of {', '.join(CUDA_GRAPHS)}.")
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline} with parallel.pipeline=1: stages are interleaved "
            "over pipeline ranks, and there is one. Write parallel.virtual_pipeline=1, or parallel.pipeline=2 or more."
        )
    if parallel.overlap_param_gather and not (parallel.distributed_optimizer and parallel.overlap_grad_reduce):
        raise ConfigError(
            "parallel.overlap_param_gather=true: only what a distributed optimizer shared is gathered, and its traffic "
            "can overlap where that of gradients does. Write parallel.distributed_optimizer=true and "
            "parallel.overlap_grad_reduce=true too (parallel=replicas has all three), or overlap_param_gather=false."
        )


def choose_backend(config: RunConfig, capability: tuple[int, int] | None) -> Backend:
    """Who multiplies on this machine; called before the model is built.

    Args:
        capability: CUDA compute capability, None without a GPU.

    Raises PrecisionError for a `precision.backend` that cannot run the recipe: both capabilities and the alternatives.
    """
    parallel, precision = config.parallel, config.precision
    linears = assign(precision, linear_shapes(config.model), parallel.tensor)
    backend = backends.choose_backend(precision, linears, capability, _find_transformer_engine)
    if backend.name != "transformer_engine":
        return backend
    if config.logging.health_every:
        raise PrecisionError(
            f"logging.health_every={config.logging.health_every}: Transformer Engine does not show what it quantizes, "
            "so there is no health to measure. Write logging.health_every=0, or precision.backend=emulated."
        )
    if parallel.tensor * parallel.context == 1:
        return backend
    split = f"parallel.tensor={parallel.tensor} and parallel.context={parallel.context}"
    reason = f"Transformer Engine scales each rank's part of a tensor by itself, and {split} split tensors"
    if precision.backend == "auto":
        return Backend("emulated", reason)
    raise PrecisionError(f"{reason}. Write precision.backend=emulated, or parallel.tensor=1 parallel.context=1.")


def choose_graphs(config: RunConfig, backend: Backend, capability: tuple[int, int] | None) -> tuple[bool, str]:
    """Whether the passes of a micro-batch are recorded as CUDA graphs on this machine, and the line that says so.

    Raises ConfigError for `parallel.cuda_graphs=always` where they cannot be: why, and what to write.
    """
    wanted = config.parallel.cuda_graphs
    if wanted == "never":
        return False, "CUDA graphs: none, as asked"
    problem = _graph_problem(config, backend, capability)
    if problem is None:
        return True, "CUDA graphs: the passes of a micro-batch are recorded in the second step of each phase"
    if wanted == "always":
        raise ConfigError(f"parallel.cuda_graphs=always: {problem}. Write parallel.cuda_graphs=auto or never.")
    return False, f"CUDA graphs: none ({problem})"


def _graph_problem(config: RunConfig, backend: Backend, capability: tuple[int, int] | None) -> str | None:
    """Why passes cannot be recorded, or None."""
    parallel = config.parallel
    if capability is None:
        return "this machine has no CUDA device"
    if backend.name == "transformer_engine":
        return "Transformer Engine's modules keep scales and caches in Python"
    for name in ("tensor", "pipeline", "context"):
        if getattr(parallel, name) > 1:
            return f"parallel.{name}={getattr(parallel, name)} exchanges tensors during the passes"
    if parallel.overlap_grad_reduce:
        return "parallel.overlap_grad_reduce=true sums gradients during the backward pass"
    if config.model.recompute != "none":
        return f"model.recompute={config.model.recompute} reads and restores the GPU's random state during the passes"
    return None


def _find_transformer_engine() -> backends.TransformerEngine:
    from nvfp4_train.precision.te_linear import find_transformer_engine

    return find_transformer_engine()
