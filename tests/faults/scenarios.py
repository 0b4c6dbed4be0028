"""Launches in which one rank of two does something wrong on purpose. Started once for all of them by `test_faults`.

python -m tests.faults.scenarios FOLDER [NAME ...]

Of each scenario `FOLDER/NAME/out` holds what was printed, and `FOLDER/NAME/end.json` exit code and seconds. Without a
name all are played, and then the seeds of `make faults` that the tests look at.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", TORCH_CPP_LOG_LEVEL="ERROR")

import torch
import torch.distributed as dist

from data.config import DataError
from data.loading import Datasets
from launch import agent
from nvfp4_train import exits, passes, phase, setup, trainer
from nvfp4_train.checkpoints import state as checkpoint
from nvfp4_train.checkpoints.writer import FileSystemWriterAsync
from nvfp4_train.environment import environment_that_counts, versions
from nvfp4_train.watch import Watch
from tests.faults.forked import Before, launch
from tests.faults.plan import ALONE, LAYOUTS, SAVES, SEEDS, plan
from tests.faults.run import Faults, state, write_text
from tests.trainer.conftest import TINY

SMALL = [
    "precision=bf16",
    "model.pattern=M-",
    "steps=4",
    "data.micro_batch=1",
    "data.global_batch=2",
    "checkpoint.every=1",
    "evaluation.every=2",
    "evaluation.sequences=2",
    "optimizer.max_skipped=2",
]
HANG, HANG_TIMEOUT = ("stopped", "rank 0 stopped"), "parallel.timeout=6"  # of the others nobody is to be given up
# Where one stays until it is told to go, or killed; elsewhere all leave by themselves, however long that takes.
STAYS = (*HANG, "stopped when all is done", "before start")
AT_A_TIME, LIMIT = 3, 120.0  # launches; seconds of one
BOOM = ValueError("boom")
Break = Callable[[int, list[str]], None]


def on(wanted: int, broken: Callable[[], None]) -> Break:
    """Something that happens on one rank alone."""
    return lambda rank, _overrides: broken() if rank == wanted else None


def entering(name: str, act: Callable[[], None]) -> Callable[[], None]:
    """Act when a phase whose name begins so is entered."""

    def install() -> None:
        real = phase.enter

        def enter(now: str) -> None:
            real(now)
            if now.startswith(name):
                act()

        phase.enter = enter  # type: ignore[assignment]

    return install


def failing(error: Exception) -> Callable[..., Any]:
    """A function that raises."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def replaced(module: Any, name: str, value: Any) -> Callable[[], None]:
    """Put something in place of a name in a module."""
    return lambda: setattr(module, name, value)


def failing_backward() -> None:
    """Raise when the loss of the second step is differentiated."""
    real = passes.loss_sum

    def loss_sum(losses: torch.Tensor, **rest: Any) -> Any:
        if losses.requires_grad and phase.current().endswith("step 2"):
            losses.register_hook(failing(BOOM))
        return real(losses, **rest)

    passes.loss_sum = loss_sum


def bad_gradient() -> None:
    """NaN in one gradient of this rank, from step 2 on, before it is added to those of other ranks."""
    real = trainer.build_quantized_model

    def build(*args: Any) -> Any:
        built = real(*args)
        norm = dict(built.chunks[0].named_parameters())["decoder.layers.1.pre_mlp_layernorm.weight"]
        norm.register_hook(lambda grad: grad * float("nan") if built.runtime.step >= 1 else grad)
        return built

    trainer.build_quantized_model = build


def struck(number: int) -> Callable[..., None]:
    """Sends this process a signal."""
    return lambda *_, **__: os.kill(os.getpid(), number)


def signalled_as_it_leaves(rank: int, _overrides: list[str]) -> None:
    """Rank 1 fails in set-up; the SIGTERM of a launcher reaches rank 0 while it finds out why it has to leave."""
    if rank == 1:
        trainer.build_quantized_model = failing(BOOM)
        return
    real = Watch.explain

    def explain(self: Watch, error: BaseException) -> BaseException:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(self, error)

    Watch.explain = explain  # type: ignore[method-assign]


def slow_to_say(rank: int, _overrides: list[str]) -> None:
    """Rank 1 fails in set-up; rank 0, which knows and has put its signals away, takes a while to say so."""
    if rank == 1:
        trainer.build_quantized_model = failing(BOOM)
        return
    real = exits.where

    def where() -> str:
        time.sleep(1.5)
        return real()

    exits.where = where


def terminating(step: int, times: int, output: Path) -> Callable[[], None]:
    """SIGTERM to the launcher, so many times, while this rank's thread writes the checkpoint of a step. Both ranks have
    heard one, as `output` says, before what follows.
    """

    def install() -> None:
        real, struck = FileSystemWriterAsync.write_preloaded_data, []

        def write(*args: Any, **options: Any) -> Any:
            if f"step-{step:08d}" in args[2][0] and not struck:
                struck.append(True)
                for said in ("SIGTERM: finishing this step", "SIGTERM again: leaving at once")[:times]:
                    before, deadline = output.read_text(encoding="utf-8").count(said), time.monotonic() + LIMIT
                    os.kill(os.getppid(), signal.SIGTERM)
                    while output.read_text(encoding="utf-8").count(said) < before + 2 and time.monotonic() < deadline:
                        time.sleep(0.02)
            return real(*args, **options)

        FileSystemWriterAsync.write_preloaded_data = write

    return install


def other_data() -> None:
    """Another corpus under the same path, as on a node with a copy of its own."""
    real = Datasets.identity.fget
    assert real is not None
    Datasets.identity = property(lambda self: {**real(self), "source data": "another"})  # type: ignore[assignment]


def other_environment() -> dict[str, str]:
    """A variable that only one rank has."""
    return {**environment_that_counts(), "NVTE_FUSED": "1"}


def other_rate(rank: int, overrides: list[str]) -> None:
    """Another command line on rank 1."""
    if rank == 1:
        overrides.append("optimizer.lr=0.5")


SCENARIOS: dict[str, Break] = {
    "nan": on(1, bad_gradient),
    "before start": on(1, entering("start", failing(BOOM))),
    "start": on(1, replaced(trainer, "build_quantized_model", failing(BOOM))),
    "data": on(1, entering("data of step 2", failing(BOOM))),
    "forward": on(1, entering("forward of step 2", failing(BOOM))),
    "backward": on(1, failing_backward),
    "update": on(0, entering("update of step 2", failing(BOOM))),
    "evaluation": on(1, entering("evaluation", failing(BOOM))),
    "start and signal": signalled_as_it_leaves,
    "start and slow": slow_to_say,
    "load": on(1, replaced(checkpoint, "load", failing(BOOM))),
    "save": on(1, replaced(checkpoint, "random_states", failing(BOOM))),
    "save on rank 0": on(0, replaced(checkpoint, "random_states", failing(BOOM))),
    "a mistake": on(1, entering("data of step 2", failing(DataError("no such text")))),
    "configuration": other_rate,
    "version": on(1, replaced(trainer, "versions", lambda: {**versions(), "torch": "2.12.0"})),
    "code": on(1, replaced(trainer, "sources", lambda: "other")),
    "environment": on(1, replaced(trainer, "environment_that_counts", other_environment)),
    "corpus": on(1, other_data),
    "stopped": on(1, entering("forward of step 2", struck(signal.SIGSTOP))),
    "rank 0 stopped": on(0, entering("forward of step 2", struck(signal.SIGSTOP))),
    "stopped when all is done": on(1, replaced(dist, "destroy_process_group", struck(signal.SIGSTOP))),
    "killed": on(1, entering("forward of step 2", struck(signal.SIGKILL))),
    "interrupted at start": on(1, replaced(trainer, "build_quantized_model", struck(signal.SIGTERM))),
    "interrupted in preparation": on(1, replaced(setup, "prepare", struck(signal.SIGTERM))),
    "interrupted in a step": on(1, entering("backward of step 3", struck(signal.SIGTERM))),
    "interrupted in evaluation": on(1, entering("evaluation after step 2", struck(signal.SIGTERM))),
}


def ranked(broken: Break) -> Before:
    """What `forked.launch` calls in each rank."""

    def before(overrides: list[str]) -> Callable[[], None]:
        broken(int(os.environ["RANK"]), overrides)
        return lambda: None

    return before


class Playing:
    """A launch under way; of "load" the second one of a run, which goes on from a checkpoint."""

    def __init__(self, name: str, root: Path) -> None:
        self.folder = folder = root / name
        folder.mkdir(parents=True)
        if name == "load":
            shutil.copytree(root / "nan" / "run", folder / "run")
        where = [f"data.path={root / 'text'}", f"data.prepared={root / 'prepared'}", f"run_dir={folder / 'run'}"]
        overrides = [*TINY, *SMALL, *where, *([HANG_TIMEOUT] if name in HANG else [])]

        def begin(rank: int, overrides: list[str]) -> None:
            (folder / f"pid.{rank}").write_text(str(os.getpid()))
            SCENARIOS[name](rank, overrides)

        self._begun = time.monotonic()
        agent.PATIENCE = 1.0 if name in STAYS else LIMIT
        self._process = launch(["--processes", "2", "--", *overrides], folder / "out", ranked(begin))

    def ended(self) -> bool:
        """Whether it is over: then what became of it is written down."""
        code, seconds = self._process.poll(), time.monotonic() - self._begun
        if code is None:
            assert seconds < LIMIT, (self.folder / "out").read_text()
            return False
        left = [rank for rank in range(2) if state(int((self.folder / f"pid.{rank}").read_text()))]
        (self.folder / "end.json").write_text(json.dumps({"code": code, "seconds": seconds, "left": left}))
        return True


def play(names: Iterable[str], root: Path) -> None:
    """Several at a time, in this order: most of them wait most of the time."""
    waiting, playing = list(names), list[Playing]()
    while waiting or playing:
        if waiting and len(playing) < AT_A_TIME:
            playing.append(Playing(waiting.pop(0), root))
        playing = [scenario for scenario in playing if not scenario.ended()]
        time.sleep(0.02)


def main() -> None:
    """All scenarios named, or all there are."""
    torch.set_num_threads(1)
    agent.LAST = 2.0
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    write_text(root / "text")
    if sys.argv[2:]:
        play(sys.argv[2:], root)
        return
    play(["nan"], root)  # prepares the corpus, and saves what "load" loads
    play([name for name in SCENARIOS if name != "nan"], root)
    agent.PATIENCE = 4.0
    faults = Faults(root / "faults")
    two = next(iter(LAYOUTS))
    calls = {two: faults.reference(two)}
    calls[ALONE] = calls[two][:1]  # near enough, and a run less
    results = {f"seed-{seed}": faults.run(plan(seed, calls)) for seed in SEEDS}
    output = faults.folder / "terminated" / "out"
    broken = [ranked(on(1, terminating(SAVES * times, times, output))) for times in (1, 2)]
    results["terminated"] = faults.run_broken("terminated", broken)
    for name, result in results.items():
        (root / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
