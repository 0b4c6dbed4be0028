"""The study's runner: what is taken next, what does not fit into the time, what is kept of a run."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import numpy as np
import pytest

from nvfp4_train.exits import ExitCode
from tests.benchmarks.study import runner
from tests.benchmarks.study.__main__ import main
from tests.benchmarks.study.cells import MAIN, Cell, Plan, Row
from tests.benchmarks.study.runner import Queue, missing, run_cells, slots
from tests.benchmarks.study.store import Store
from tests.comparison.synthetic import make_run

STEPS = 8
GRADIENT, HEAD = "decoder.layers.0.mixer.in_proj", "output_layer"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.make(MAIN, [], "corpus", STEPS)


def cell(name: str, seed: int = 1) -> Cell:
    return Cell(MAIN, Row(name, (f"precision={name.partition(',')[0]}",)), seed)


def write_run(folder: Path, losses: Sequence[float]) -> None:
    """A run folder as training leaves it: steps of half a second, health at the last of them."""
    health = {
        f"quant/{GRADIENT}/fprop_input/flushed": 0.25,
        "quant/decoder.layers.1.mlp.linear_fc1/fprop_input/flushed": 0.05,
        f"quant/{GRADIENT}/weight_gradient/zeros": 0.1,
        "quant/decoder.layers.1.mlp.linear_fc1/weight_gradient/zeros": 0.2,
        f"quant/{HEAD}/weight_gradient/zeros": 0.9,  # in BF16: not counted
    }
    extra = {step: {"time/step_s": 0.5} for step in range(1, STEPS + 1)}
    extra[STEPS] |= health
    make_run(folder, np.array(losses), val={STEPS: 2.5}, extra=extra, tokens_per_step=65_536)
    linears = [
        {"name": GRADIENT, "format": "nvfp4", "in_features": 100, "out_features": 30},
        {"name": "decoder.layers.1.mlp.linear_fc1", "format": "nvfp4", "in_features": 100, "out_features": 10},
        {"name": HEAD, "format": "bf16", "in_features": 100, "out_features": 800},
    ]
    (folder / "precision.json").write_text(json.dumps({"coverage": {"linear_percent": 63.0}, "linears": linears}))
    surroundings = {"device": "cpu", "versions": {"torch": "2.11.0"}}
    (folder / "environment.json").write_text(json.dumps(surroundings))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Stands for training: the exit code of each row, and the runs that ended well written at once."""
    codes: dict[str, int] = {}

    def start(path: Path, arguments: Sequence[str], threads: int, environment: Mapping[str, str]) -> SimpleNamespace:
        (recipe,) = [text.removeprefix("precision=") for text in arguments if text.startswith("precision=")]
        code = codes.setdefault(recipe, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.log").write_text("the reason\n")
        if code in runner.RESULTS:
            write_run(path, np.linspace(3, 2, STEPS) if code == 0 else [3.0, 2.9, *[np.nan] * (STEPS - 2)])
        return SimpleNamespace(wait=lambda timeout: code)

    monkeypatch.setattr(runner, "start_training", start)
    return codes


def test_slots_are_spread_over_gpus() -> None:
    places = slots(2, 2, 16)
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places] == ["0", "1", "0", "1"]
    assert {place.threads for place in places} == {4}
    assert [place.delay for place in places] == [0, 0, runner.START_S, runner.START_S]
    assert [(place.environment, place.threads) for place in slots(0, 2, 2)] == [({}, 1)] * 2


def test_finished_runs_are_kept_and_not_taken_again(plan: Plan, tmp_path: Path, trained: dict[str, int]) -> None:
    store, wanted = Store(tmp_path / "kept"), [cell("bf16"), cell("nvfp4"), cell("mxfp4")]
    trained |= {"nvfp4": ExitCode.MISTAKE, "mxfp4": ExitCode.NON_FINITE}
    said: list[str] = []
    queue = Queue(deque(missing(plan, wanted, [])), None)
    failures = run_cells(queue, slots(0, 1, 1), tmp_path / "runs", store, said.append)
    assert failures == [f"main-nvfp4-seed1: main-nvfp4-seed1-{plan.setup} ended with exit code 2:\nthe reason"]
    bf16, mxfp4 = store.records()
    assert (bf16.row, bf16.tokens, bf16.seconds, bf16.step_ms) == ("bf16", STEPS * 65_536, 4.0, 500.0)
    assert (bf16.val_loss, bf16.above_four, bf16.linear_percent, bf16.jobs) == (2.5, 100.0, 63.0, 1)
    assert bf16.zeros == pytest.approx((0.1 * 30 + 0.2 * 10) / 40)
    assert bf16.zeros_worst == 0.2
    assert bf16.flushed_shares() == {"fprop_input": 0.15}
    assert bf16.flushed_worst == f"0.25000 {GRADIENT}/fprop_input"
    assert (mxfp4.row, np.isnan(mxfp4.train_loss)) == ("mxfp4", True)
    assert [one.row.name for _, one in missing(plan, wanted, store.records())] == ["nvfp4"]
    other = replace(plan, corpus="another")
    assert len(missing(other, wanted, store.records())) == 3
    assert queue.pace["bf16"] == pytest.approx(4.0 / (STEPS * 65_536))


def test_three_failures_are_enough(plan: Plan, tmp_path: Path, trained: dict[str, int]) -> None:
    trained["bf16"] = ExitCode.INTERNAL
    queue = Queue(deque((plan, cell("bf16", seed)) for seed in range(9)), None)
    failures = run_cells(queue, slots(0, 1, 1), tmp_path / "runs", Store(tmp_path), lambda line: None)
    assert (len(failures), len(queue.waiting)) == (runner.MOST_FAILURES, 6)


def test_what_does_not_fit_into_the_time_is_not_started(plan: Plan) -> None:
    now = 0.0
    queue = Queue(deque([(plan, cell("nvfp4")), (plan, cell("mxfp4"))]), 100.0, clock=lambda: now)
    assert queue.needed(plan, cell("nvfp4")) is None
    assert queue.next() is not None  # nothing is known of how long it takes
    queue.pace["nvfp4"] = 50 / plan.tokens
    assert queue.needed(plan, cell("mxfp4")) == pytest.approx(runner.START_S + runner.SPARE * 50)
    now = 25.0
    assert queue.next() is None  # 25 + 80 s
    now = 19.0
    taken = queue.next()
    assert taken is not None
    assert taken[1].row.name == "mxfp4"


@pytest.mark.parametrize(
    ("code", "result"), [(75, ExitCode.INTERRUPTED), (0, ExitCode.DONE), (1, ExitCode.INTERRUPTED)]
)
def test_a_process_is_told_to_stop_when_the_time_is_over(code: int, result: ExitCode) -> None:
    program = f"import signal, sys; signal.signal(15, lambda *_: sys.exit({code})); print(flush=True); signal.pause()"
    with Popen([sys.executable, "-S", "-c", program], stdout=PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert runner._wait(process, 0.0) == result


def test_an_interrupted_cell_is_neither_kept_nor_a_failure(
    plan: Plan, tmp_path: Path, trained: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained |= {"bf16": ExitCode.INTERRUPTED, "nvfp4": ExitCode.INTERRUPTED}
    just_made_it = tmp_path / "runs" / f"main-nvfp4-seed1-{plan.setup}"
    write_run(just_made_it, np.linspace(3, 2, STEPS))
    log = just_made_it.with_name(f"{just_made_it.name}.log")
    monkeypatch.setattr(runner, "finished", lambda path, arguments: path == just_made_it and log.exists())
    said: list[str] = []
    queue = Queue(deque([(plan, cell("bf16")), (plan, cell("nvfp4"))]), 1e12)
    assert run_cells(queue, slots(0, 1, 1), tmp_path / "runs", Store(tmp_path), said.append) == []
    assert [one.row for one in Store(tmp_path).records()] == ["nvfp4"]
    assert said[0] == f"main-bf16-seed1: not finished in time; saved in {tmp_path}/runs/main-bf16-seed1-{plan.setup}"


def test_the_command_prepares_trains_keeps_and_reports(
    tmp_path: Path, trained: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    source, results = tmp_path / "text", tmp_path / "results"
    source.mkdir()
    for number in range(12):
        (source / f"m{number}.py").write_text(f"def function_{number}(x):\n    return x + {number}\n")
    data = [f"data.path={source}", f"data.prepared={tmp_path / 'corpora'}", "tokenizer.vocab_size=270",
            "data.validation_share=.2"]  # fmt: skip
    command = ["--results", str(results), "run", "--folder", str(tmp_path / "runs"), "--jobs", "1", "--gpus", "0",
               "--steps", str(STEPS), "--only", "main-[bn]*[64]-seed1", "--tables", "main"]  # fmt: skip
    trained["nvfp4"] = ExitCode.MISTAKE
    assert main([*command, *data]) == ExitCode.INTERNAL  # one of them failed
    done = capsys.readouterr()
    assert "2 runs to train, 1 at once on no GPU(s)" in done.out
    assert "ended with exit code 2:\nthe reason" in done.err
    assert [line.row for line in Store(results / "study").records()] == ["bf16"]
    kept = {path.name for path in (results / "study").iterdir()}
    assert {"runs.csv", "curves", "corpus.csv", "corpus.txt", "tokenizer.json"} <= kept
    assert "in 12 files of 12 packages" in (results / "study.md").read_text()
    trained["nvfp4"] = 0
    assert main([*command, *data]) == ExitCode.DONE
    again = capsys.readouterr().out
    assert f"tokenizer: {results / 'study' / 'tokenizer.json'} is there already" in again
    assert "1 runs to train" in again  # what is kept is not trained again


@pytest.mark.parametrize("command", ["run", "times"])
def test_without_a_gpu_nothing_is_prepared_or_kept(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--results", str(tmp_path), command]) == ExitCode.MISTAKE
    said = capsys.readouterr().err
    assert "there is none here" in said
    assert ("--gpus 0" in said) == (command == "run")
    assert list(tmp_path.iterdir()) == []
