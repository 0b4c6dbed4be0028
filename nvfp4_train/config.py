"""The whole configuration of a run, as frozen dataclasses. No torch here.

Values live in `configs/` (Hydra groups of the same names as the fields); this file is the schema, and what it does not
have is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from data.config import DataConfig, TokenizerTraining
from models.config import ModelConfig
from nvfp4_train.precision.config import PrecisionConfig


class ConfigError(ValueError):
    """A user's mistake in configuration or command line: says what was wrong, why, and what to write instead."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW in FP32 (Megatron's optimizer).

    Attributes:
        lr: the learning rate that is held after warm-up.
        beta1, beta2, eps, weight_decay: Adam's; A_log, D, dt_bias, norms, biases and the convolution take no decay.
        clip: largest global gradient norm; 0 does not clip.
        fuse_wgrad: add weight gradients straight into the FP32 gradient buffer.
        max_skipped: steps in a row with non-finite gradients after which the run stops.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    fuse_wgrad: bool = True
    max_skipped: int = 5


@dataclass(frozen=True)
class ScheduleConfig:
    """Warm-up, stable, decay. Durations: a share of the run below 1, a number of steps, or a text such as `2B tokens`.

    Attributes:
        warmup: linear, from 0 to lr.
        decay: the last part of the run, from lr to lr * min_lr_ratio.
        decay_style: linear, cosine, exponential or minus_sqrt.
        min_lr_ratio: the last learning rate over lr.
    """

    warmup: float | int | str
    decay: float | int | str
    decay_style: str = "linear"
    min_lr_ratio: float = 0.01


@dataclass(frozen=True)
class ParallelConfig:
    """How the model and the batch are split over ranks; what remains of the world is data parallel.

    Attributes:
        tensor: ranks that share every linear, the embedding and the heads.
        sequence: those ranks also share the tokens between linears.
        pipeline: ranks that hold one stage of blocks after another; `|` in the pattern cuts it, otherwise evenly.
        virtual_pipeline: stages a rank; above 1 they are interleaved.
        context: ranks that share each sequence.
        expert: 1.
        distributed_optimizer: replicas share moments and updates (ZeRO-1).
        overlap_grad_reduce: sum gradients over replicas during the backward pass.
        overlap_param_gather: gather updated weights during the next forward pass; with a distributed optimizer.
        cuda_graphs: record the passes of a micro-batch once and replay them, so that a GPU need not wait for Python;
            same bits. auto (wherever they can be recorded), always, or never.
        timeout: seconds without a sign of life after which the other ranks give one up and end; 0 never. One call that
            keeps a process from running Python for longer looks the same.
    """

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    cuda_graphs: str = "auto"
    timeout: float = 20.0


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved, besides after the last step, and which checkpoints stay.

    Attributes:
        every: steps between checkpoints, 0 for none.
        keep: newest checkpoints kept, 0 keeps all.
        keep_every: checkpoints of multiples of this step are kept beside them, 0 for none.
    """

    every: int
    keep: int = 2
    keep_every: int = 0


@dataclass(frozen=True)
class EvaluationConfig:
    """When validation text is scored, besides after the last step.

    Attributes:
        every: steps between evaluations, 0 for none.
        sequences: how many validation sequences are scored; 0 scores none.
        bf16: score with all GEMMs in BF16 too.
    """

    every: int
    sequences: int
    bf16: bool = False


@dataclass(frozen=True)
class LoggingConfig:
    """What is told to whom.

    Attributes:
        wandb: auto (online with a key, else offline), online, offline or disabled.
        project, group, name: wandb's; None for group and name takes them from the run folder.
        health_every: steps between samples of quantization health, 0 for never.
    """

    wandb: str = "auto"
    project: str = "nvfp4_train"
    group: str | None = None
    name: str | None = None
    health_every: int = 0


@dataclass(frozen=True)
class DebugConfig:
    """Runs that are there to find something out.

    Attributes:
        overfit: train on the first global batch again and again.
        profile: steps to profile into the run folder.
    """

    overfit: bool = False
    profile: int = 0


@dataclass(frozen=True)
class RunConfig:
    """One run.

    Attributes:
        name: what the run is called in its default folder and in wandb.
        steps: optimizer steps of the whole run.
        seed: of weights, data order and random bits.
        deterministic: on a GPU, only kernels that add in one fixed order: a run that is repeated or resumed has the
            same bits. Without it the fastest kernels are tried out at start. On a CPU it is always so.
        run_dir: folder of the run; None makes a new one under ./runs.
        resume: auto (continue what run_dir holds), never, or the path of a run folder or checkpoint to branch from.
        stop_after: leave after this step as an interruption would.
        baseline: run folder to log the live gap against.
        tokenizer: one that `prepare` trains; training a model has no use for it.
        shard: `2/8` is the second of eight `prepare` commands that share the work, on any machines.
    """

    model: ModelConfig
    precision: PrecisionConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    parallel: ParallelConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig
    debug: DebugConfig
    steps: int
    name: str = "run"
    seed: int = 1
    deterministic: bool = True
    run_dir: str | None = None
    resume: str = "auto"
    stop_after: int | None = None
    baseline: str | None = None
    tokenizer: TokenizerTraining = field(default_factory=TokenizerTraining)
    shard: str | None = None
