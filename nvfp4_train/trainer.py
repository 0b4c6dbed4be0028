"""One run: set up, resume, then step after step: batch, forward and backward, agreement, update, metrics, evaluation,
checkpoint. Everything is handed on as arguments; the order of this file is the order of a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from models.megatron_cpu import megatron_device
from nvfp4_train import gradients, phase
from nvfp4_train.batches import StepBatch, step_batches
from nvfp4_train.checkpoints import state as checkpoint
from nvfp4_train.checkpoints.files import Header, read_header
from nvfp4_train.checkpoints.writer import CheckpointWriter
from nvfp4_train.comparison.live import LiveGap
from nvfp4_train.config import RunConfig
from nvfp4_train.console import Console
from nvfp4_train.distributed import World, any_rank, check_same, gather, on_main, process_groups
from nvfp4_train.environment import environment, environment_that_counts, sources, versions
from nvfp4_train.evaluation import validation_metrics
from nvfp4_train.exits import ExitCode
from nvfp4_train.first_bad import first_bad
from nvfp4_train.graphs import MicroBatchGraphs
from nvfp4_train.layout import choose_backend, choose_graphs, tokens_per_step
from nvfp4_train.metrics import Metrics, MetricsFile, marked_passes
from nvfp4_train.optimizer import (
    build_optimizer,
    describe_groups,
    gather_parameters,
    set_learning_rate,
    take_back,
    update,
    updated_here,
    wrap_data_parallel,
)
from nvfp4_train.outcome import Found, Outcome
from nvfp4_train.passes import Batch, run_micro_batches
from nvfp4_train.precision.phases import Passes
from nvfp4_train.profiling import profiler
from nvfp4_train.run_folder import LOCK, RunFolder, another_recipe, prepare_run_folder, recipe_of
from nvfp4_train.schedule import build_schedule
from nvfp4_train.schema import to_mapping
from nvfp4_train.setup import build_quantized_model, compute_capability, device_name, open_datasets, write_data_record
from nvfp4_train.shared_folder import check_same_checkpoint, check_shared
from nvfp4_train.signals import StopSignals
from nvfp4_train.storage import refusals_said
from nvfp4_train.throughput import peak_memory_gib, throughput_of
from nvfp4_train.trackers import start_tracker


def train(config: RunConfig) -> ExitCode:
    """The run that `config` describes, from its beginning or from its last checkpoint.

    Returns:
        DONE, INTERRUPTED after a signal (saved), or NON_FINITE after too many skipped steps in a row (not saved).
    """
    phase.enter(phase.START)
    started_with = _started_with(config)
    with StopSignals() as signals, process_groups(config.parallel, config.seed, started_with, signals) as world:
        console = Console(world.is_main, config.steps)
        capability = compute_capability(world.device)
        backend = choose_backend(config, capability)
        console.say(backend.line(config.precision))
        graphs, graph_line = choose_graphs(config, backend, capability)
        console.say(graph_line)
        surroundings = environment(device_name(world.device), world.size, capability)
        folder = prepare_run_folder(config, world.is_main, lambda item: gather(item, world)[0])
        try:
            idle = folder.nothing_to_do()
            if idle is not None:
                console.say(idle)
                return ExitCode.DONE
            console.say(folder.announcement())
            with refusals_said(folder.path):
                check_shared(folder.path / LOCK, world)
                check_same_checkpoint(folder.checkpoints, folder.checkpoint, world)
                return Trainer(folder, world, console, graphs).run(signals, surroundings)
        finally:
            if world.is_main:
                folder.leave()


def _started_with(config: RunConfig) -> dict[str, Any]:
    """What must be the same on all ranks: the whole configuration, and what else the numbers hang on."""
    surroundings = {"versions": versions(), "code": sources(), "environment": environment_that_counts()}
    return {"config": to_mapping(config), **surroundings}


class Trainer:
    """A run that is set up: what it is made of, and where it stands.

    Attributes:
        step, samples, tokens: done and consumed so far, skipped steps included.
        skipped: how many of the last steps in a row were skipped.
        report: the precision report.
        recipe_changed: whether the checkpoint that this run goes on from was trained in another recipe.
        saved_step: the step of the last checkpoint that was requested, or where the run began.
    """

    def __init__(self, folder: RunFolder, world: World, console: Console, graphs: bool) -> None:
        self.folder, self.config, self.world, self.console = folder, folder.config, world, console
        config, say = self.config, console.say
        self.live_gap = None if config.baseline is None else self._open_baseline(config.baseline)
        start = None if folder.checkpoint is None else read_header(folder.checkpoint)
        self.step, self.samples, self.tokens, self.skipped = (
            (0, 0, 0, 0) if start is None else (start.step, start.samples, start.tokens, start.skipped)
        )
        self.saved_step = self.step
        self.recipe_changed = folder.decision == "resume" and start is not None and another_recipe(start, config)
        self.datasets = open_datasets(config, say, start, resumed=folder.decision == "resume")
        check_same({"data": self.datasets.identity}, world)

        quantized = build_quantized_model(config, world, say)
        self.report = quantized.report
        self.chunks, self.runtime, self.backend = quantized.chunks, quantized.runtime, quantized.backend
        self.assignments, self.passes = quantized.assignments, quantized.passes
        self.parallel_chunks = wrap_data_parallel(self.chunks, config.parallel)
        self.optimizer = build_optimizer(config.optimizer, config.parallel, self.parallel_chunks)
        self.gradient_norm = gradients.GradientNorm(self.chunks, updated_here(self.optimizer))
        self.graphs = MicroBatchGraphs(self.parallel_chunks[0], self.runtime, world) if graphs else None
        say(describe_groups(self.chunks, config.optimizer.weight_decay))
        self.schedule = build_schedule(config.schedule, config.optimizer, config.steps, tokens_per_step(config))

        emulated = self.backend.name == "emulated"
        self.throughput = throughput_of(config, world, self.assignments, emulated=emulated)
        for line in self.throughput.describe(self.passes.at(self.step + 1)):
            say(line)
        self.metrics = MetricsFile(folder.metrics)
        self.checkpoints = CheckpointWriter(folder.checkpoints, config.checkpoint, world, say, folder.checkpoint)
        if folder.checkpoint is not None:
            self._load(folder.checkpoint)

    def _open_baseline(self, baseline: str) -> LiveGap:
        """The run to log the gap against, with a line where the two will not count as paired."""
        live_gap = LiveGap(baseline)
        for reason in live_gap.reasons(to_mapping(self.config)):
            self.console.warn(f"not paired with the baseline {baseline}: {reason}")
        return live_gap

    def _load(self, path: Path) -> None:
        """Everything of the checkpoint at `path`, with a line for what is not as it was."""
        loaded = checkpoint.load(path, self._state(), self.world)
        self.runtime.weights_changed()
        if loaded.new_histories:
            self.console.say(f"delayed scaling: {len(loaded.new_histories)} tensors start with an empty amax history")
        before, now = loaded.header.environment, self._origin()
        changed = [f"{key} {before.get(key)} there, {now[key]} here" for key in now if before.get(key) != now[key]]
        if changed:
            self.console.warn(f"{path.name} was written elsewhere, so last bits may differ: {'; '.join(changed)}")

    def _state(self) -> checkpoint.TrainingState:
        return checkpoint.TrainingState(self.chunks, self.optimizer, self.runtime)

    def _origin(self) -> dict[str, str]:
        """What numbers hang on besides the configuration: stored in a checkpoint, compared when it is loaded."""
        capability = compute_capability(self.world.device)
        return {
            "device": device_name(self.world.device),
            "compute capability": ".".join(map(str, capability)) if capability else "none",
            "backend": self.backend.name,
        }

    # ---- the run

    def run(self, signals: StopSignals, surroundings: dict[str, Any]) -> ExitCode:
        """Steps until the end, `stop_after`, a signal, or too many skipped steps.

        Args:
            surroundings: for `environment.json`; the run folder's files are written here, when all else is ready.
        """
        config = self.config
        on_main(self.world, partial(self._write_down, surroundings))
        if self.live_gap is not None:
            self.live_gap.restore(self.folder.path)
        self.tracker = start_tracker(
            config.logging, self.folder.path, config.name, to_mapping(config), self.world.is_main, self.console.say
        )
        code = ExitCode.INTERNAL
        try:
            signals.finish_steps = True
            with self.console.running(self.step), profiler(config.debug.profile, self.folder.path) as profile_step:
                code = self._loop(signals, profile_step)
                self.checkpoints.finish()
            phase.enter("end")
        except BaseException as error:
            self.world.report(error)  # before the tracker's last uploads
            raise
        finally:
            self.checkpoints.abandon()  # of a save that an error left under way
            self.metrics.close()
            self.tracker.finish(code)
        return code

    def _write_down(self, surroundings: dict[str, Any]) -> None:
        """The run folder's files for this start, and the metrics cut to where it begins."""
        self.console.say(self.folder.record(surroundings, self.report))
        write_data_record(self.folder.path, self.datasets, self.config.data.global_batch, self.step, self.samples)
        lost = self.metrics.cut_after(self.step, self.folder.first_step)
        if lost is not None:
            self.console.warn(lost)

    def _loop(self, signals: StopSignals, profile_step: Callable[[], None]) -> ExitCode:
        config = self.config
        batches = step_batches(self.datasets, config, self.world, self.samples)
        while self.step < config.steps:
            if any_rank(signals.received is not None, self.world):
                return self._leave_interrupted()
            if config.stop_after is not None and self.step >= config.stop_after:
                self.console.say(f"stopped after step {self.step}, as asked; nothing was saved for it")
                return ExitCode.DONE
            self.checkpoints.poll()
            metrics = self._train_step(batches)
            profile_step()
            if _due(config.evaluation.every, self.step, config.steps):
                metrics |= self._evaluate()
            if self.live_gap is not None:
                metrics |= self.live_gap.update(self.step, self.tokens, metrics["train/loss"], metrics.get("val/loss"))
            if self.world.is_main:
                self.metrics.write(metrics)
            self.tracker.log(metrics)
            self.console.step(metrics)
            if self.skipped >= config.optimizer.max_skipped:
                self.console.say(f"stopped at step {self.step}: {self.skipped} skipped in a row; none of them is saved")
                return ExitCode.NON_FINITE
            if _due(config.checkpoint.every, self.step, config.steps) and not self._save():
                return ExitCode.NON_FINITE
        return ExitCode.DONE

    def _train_step(self, batches: Iterator[StepBatch]) -> Metrics:
        """One optimizer step, or a skipped one; returns what there is to say about it."""
        start = time.perf_counter()
        config, runtime, step = self.config, self.runtime, self.step + 1
        passes = self._passes_of(step)
        runtime.sample_health = config.logging.health_every > 0 and step % config.logging.health_every == 0
        runtime.begin_step(self.step, passes)
        with megatron_device():
            gradients.start_gradients(self.parallel_chunks)
        phase.enter(f"data of step {step}")
        asked = time.perf_counter()
        batch = next(batches)  # late: the thread that reads now begins with the next one, and takes turns with this
        waited = time.perf_counter() - asked
        total = run_micro_batches(
            self.parallel_chunks, batch.micro_batches, runtime, self.world, training=True, graphs=self.graphs
        )
        phase.enter(f"update of step {step}")
        if runtime.observing:
            runtime.check_observed(self.assignments, passes)
        outcome, lr = Outcome(total, self.gradient_norm(), config.optimizer.clip, self.world), self.schedule.at(step)
        self._update(outcome.factor, lr)
        described = self._describe(batch, passes)  # the device is at work
        found = outcome.wait()  # the step's one wait for it
        runtime.end_step(found.skipped)
        if found.skipped:
            self._skip(found, batch.micro_batches)
        else:
            self.skipped = 0
        self.step, self.samples = step, self.samples + config.data.global_batch
        self.tokens += self.throughput.tokens_per_step
        return {
            "step": step,
            "tokens": self.tokens,
            "train/loss": found.loss,
            "optim/lr": lr,
            "optim/grad_norm": found.norm,
            "time/data_s": waited,
            **self.throughput.metrics(time.perf_counter() - start, passes),
            **described,
            **(self._health() if runtime.sample_health else {}),
        }

    def _update(self, factor: Tensor, lr: float) -> None:
        """Step with the gradients times `factor`, if that is a number; quantized weights are stale then."""
        set_learning_rate(self.optimizer, lr)
        update(self.optimizer, self.parallel_chunks, factor)
        self.runtime.weights_changed()

    def _describe(self, batch: StepBatch, passes: Passes) -> Metrics:
        """What there is to say about the step under way besides its numbers."""
        step, samples = self.step + 1, self.samples + self.config.data.global_batch
        return {
            "memory/peak_gib": peak_memory_gib(),
            "data/hash": self._hash(batch),
            **{f"data/tokens/{name}": count for name, count in self.datasets.tokens_read(samples).items()},
            **self._phase_marker(step, passes),
            **self._recipe_marker(step),
        }

    def _skip(self, found: Found, micro_batches: list[Batch]) -> None:
        """The update left weights and moments as they are; say where the first bad number came from.

        The step counts: its data is consumed and the learning rate moves on, so runs stay comparable at equal tokens.
        """
        take_back(self.optimizer, self.parallel_chunks)
        self.skipped += 1
        if self.graphs is not None:
            self.graphs.make_room()
        source = first_bad(self.parallel_chunks, micro_batches, self.runtime, self.world, self.step, found.loss)
        self.console.warn(
            f"step {self.step + 1} skipped ({self.skipped} of {self.config.optimizer.max_skipped} in a row): "
            f"loss {found.loss:g}, gradient norm {found.norm:g}; first bad {source}"
        )

    def _passes_of(self, step: int) -> Passes:
        """The passes in force, with a line where a phase begins, or where the run goes on within one."""
        passes = self.passes.at(step)
        begins = [stage for stage in self.passes.switches if stage.step == step]
        if begins:
            self.console.say(begins[0].text)
        elif self.step == self.folder.step and passes != Passes():
            self.console.say(f"precision at step {step}: {passes}")
        return passes

    def _phase_marker(self, step: int, passes: Passes) -> Metrics:
        """Names of the passes where they are not those of the line before: a phase begins, or a resume changed them."""
        before = self.passes.at(step - 1) if step > self.folder.step + 1 else marked_passes(self.folder.metrics)
        return {} if passes == before else {f"precision/{name}": value for name, value in passes._asdict().items()}

    def _recipe_marker(self, step: int) -> Metrics:
        """Name of the recipe, in the first line after a resume that changed it.

        The checkpoint says what it was trained in, so a marker that a crash cut off comes back with its step.
        """
        changed = self.recipe_changed and step == self.folder.step + 1
        return {"precision/recipe": self.config.precision.name} if changed else {}

    def _health(self) -> Metrics:
        """Quantization health of every linear, wherever it is; of what several ranks hold, the first one's share."""
        return dict(
            item for found in reversed(gather(self.runtime.health.metrics(), self.world)) for item in found.items()
        )

    def _hash(self, batch: StepBatch) -> str:
        """Hash of the step's global batch. Ranks of a replica must have read the same: checked at the first step."""
        found = batch.hash(self.world)
        if self.step == self.folder.step:
            check_same({"data/hash": found}, self.world)
        return found

    def _evaluate(self) -> Metrics:
        phase.enter(f"evaluation after step {self.step}")
        if self.graphs is not None:  # its passes run without
            self.graphs.make_room()
        start = time.perf_counter()
        score = partial(
            validation_metrics, self.parallel_chunks, self.datasets, self.config.data, self.runtime, self.world
        )
        found: Metrics = score() | (score(bf16=True) if self.config.evaluation.bf16 else {})
        if found:
            values = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
            self.console.say(f"validation at step {self.step}: {values}  ({time.perf_counter() - start:.1f} s)")
        return found

    def _save(self) -> bool:
        """Request a checkpoint of this step; False where the weights are not finite, which are never saved."""
        phase.enter(f"save after step {self.step}")
        start = time.perf_counter()
        gather_parameters(self.parallel_chunks)
        bad = gather(gradients.first_bad_weight(self.chunks), self.world)
        if any(bad):
            rank, name = next((rank, name) for rank, name in enumerate(bad) if name)
            self.console.warn(f"step {self.step} is not saved: weight {name} is not finite on rank {rank}")
            return False
        header = Header(
            step=self.step,
            samples=self.samples,
            tokens=self.tokens,
            skipped=self.skipped,
            precision=self.config.precision.name,
            environment=self._origin(),
            world=self.world.size,
            recipe=recipe_of(self.config),
            data=self.datasets.identity,
        )
        self.metrics.flush()
        self.checkpoints.request(self._state(), header, start)
        self.saved_step = self.step
        return True

    def _leave_interrupted(self) -> ExitCode:
        if self.step != self.saved_step and not self._save():
            return ExitCode.NON_FINITE
        self.checkpoints.finish()
        self.console.say(f"interrupted after step {self.step}, which is saved; the same command goes on from there")
        return ExitCode.INTERRUPTED


def _due(every: int, step: int, steps: int) -> bool:
    """At every multiple of `every`, and at the last step; 0 is the last step alone."""
    return step == steps or (every > 0 and step % every == 0)
