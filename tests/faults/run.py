"""Runs that are hit at random moments, resumed until they are done, and compared with one that nothing hit.

python -m tests.faults.run --runs 50 --real 4 --folder runs/faults      # make faults
python -m tests.faults.run --seed 17                                    # one run again

A run of two processes is killed (-9, -TERM) or stopped for longer than the timeout, one of its ranks or its launcher,
one to three times, within any phase; a run of one process, which has no launcher, is killed. At the end weights,
moments, losses, gradient norms and hashes of the batches must be those of the run that nothing hit, bit for bit. One
line a run, a table at the end; exit code 1 where one differs. What is done is kept in the folder, so the same command
goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", TORCH_CPP_LOG_LEVEL="ERROR")

import torch

from nvfp4_train.environment import sources
from nvfp4_train.exits import ExitCode
from tests.faults.equal import first_difference
from tests.faults.forked import Before, ForkedProcess, alone, launch
from tests.faults.moments import KINDS, LAUNCHER, Moments
from tests.faults.plan import ALONE, LAYOUTS, SAME_AS, STEPS, TIMEOUT, Calls, Plan, plan
from tests.faults.real import Real, Started, reals

STARTS, LIMIT, SOON = 8, 240.0, 30.0  # starts a run, seconds a start, seconds until all have stopped
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "far")
Result = dict[str, Any]


def before(folder: Path, *, counting: bool) -> Before:
    """What each rank does when it begins: listen for its moment."""

    def begin(_overrides: list[str]) -> Callable[[], None]:
        moments = Moments(folder, int(os.environ.get("RANK", 0)), counting=counting)
        moments.listen()
        return moments.write_counts

    return begin


class Faults:
    """All runs of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / "text")
        self._where = [f"data.path={self.folder / 'text'}", f"data.prepared={self.folder / 'prepared'}"]

    # ---- the run that nothing hits

    def reference(self, layout: str) -> list[Calls]:
        """Runs a layout once, without a fault; returns how many calls each of its phases had, by rank."""
        folder = self._whole(layout)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            process = self._launch(Plan(0, layout, 0, ()), folder, before(folder, counting=True))
            code = process.wait(LIMIT)
            assert code == ExitCode.DONE, (folder / "out").read_text()
            (folder / "done").touch()
        found = sorted(folder.glob("calls.*.json"))
        return [calls(json.loads(file.read_text())) for file in found]

    def _whole(self, layout: str) -> Path:
        return self.folder / "whole" / layout.replace(" ", "-")

    def _launch(self, run: Plan, folder: Path, begin: Before) -> ForkedProcess:
        overrides = run.overrides([*self._where, f"run_dir={folder / 'run'}"])
        if run.layout == ALONE:
            return alone(overrides, folder / "out", begin)
        options = ["--processes", "2", "--restarts", str(run.restarts), "--", *overrides]
        return launch(options, folder / "out", begin)

    # ---- a run that is hit

    def run(self, run: Plan) -> Result:
        """A run that is hit as planned, started again and again until it is done; what became of it."""
        folder = self._fresh(f"seed-{run.seed}")
        (folder / "plan.json").write_text(json.dumps([asdict(hit) for hit in run.hits], indent=1))
        begin = before(folder, counting=False)
        result = self._until_done(lambda: self._launch(run, folder, begin), run.layout, folder, len(run.hits))
        return {
            "seed": run.seed,
            "layout": run.layout,
            "hits": [str(hit) for hit in run.hits],
            "signals": [hit.signal for hit in run.hits],
            "targets": ["launcher" if hit.target == LAUNCHER else "rank" for hit in run.hits],
            "kinds": [hit.kind for hit in run.hits],
            **result,
        }

    def run_real(self, real: Real) -> Result:
        """The same of a run as a user starts it."""
        folder = self._fresh(f"seed-{real.seed}")
        where = [*self._where, f"run_dir={folder / 'run'}"]
        result = self._until_done(lambda: Started(real, where, folder), real.layout, folder, 1)
        target = "launcher" if real.target == LAUNCHER else "rank"
        named = {"signals": [real.signal.name], "targets": [target], "kinds": ["a real start"]}
        return {"seed": real.seed, "layout": real.layout, "hits": [str(real)], **named, **result}

    def run_broken(self, name: str, broken: Sequence[Before]) -> Result:
        """A run whose first starts are `broken`, each in its way, and the last one is not.

        Returns:
            Exit codes, what was in the folder of checkpoints after each start, all that was printed, and the verdict.
        """
        folder = self._fresh(name)
        run = Plan(0, next(iter(LAYOUTS)), 0, ())
        codes, left = [], []
        for begin in (*broken, lambda _overrides: lambda: None):
            codes.append(self._start(self._launch(run, folder, begin), folder))
            left.append(sorted(entry.name for entry in (folder / "run" / "checkpoints").iterdir()))
        printed = (folder / "out").read_text().splitlines()
        return {"codes": codes, "left": left, "printed": printed, "verdict": self._compare(run.layout, folder)}

    def _fresh(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _until_done(
        self, start: Callable[[], ForkedProcess | Started], layout: str, folder: Path, hits: int
    ) -> dict[str, Any]:
        begun, slowest, verdict = time.monotonic(), 0.0, "not done"
        codes: list[int] = []
        while len(codes) < STARTS:
            code = self._start(start(), folder)
            if code != ExitCode.DONE:
                slowest = max(slowest, self._stop_time(folder, len(codes)))
            codes.append(code)
            if code == ExitCode.DONE:
                verdict = self._compare(layout, folder)
                break
            if code not in (ExitCode.INTERNAL, ExitCode.INTERRUPTED, -signal.SIGKILL):
                verdict = f"exit code {code}"
                break
        if verdict == "same" and slowest > SOON:
            verdict = f"stopped after {slowest:.0f} s"
        return {
            "struck": [(folder / f"struck.{number}").exists() for number in range(hits)],
            "codes": codes,
            "restarts": max(len(codes) + (folder / "out").read_text().count("launch: restart "), begun_runs(folder))
            - 1,
            "stopped": round(slowest, 1),
            "seconds": round(time.monotonic() - begun, 1),
            "verdict": verdict,
        }

    def _start(self, process: ForkedProcess | Started, folder: Path) -> int:
        """One launch to its end; every process of it is gone afterwards. A launcher that was stopped goes on later."""
        deadline = time.monotonic() + LIMIT
        woken = 0.0
        while process.poll() is None:
            if time.monotonic() > deadline:
                self._end(folder, process)
                return -1
            if state(process.pid) == "T":
                woken = woken or time.monotonic() + TIMEOUT + 2
                if time.monotonic() > woken:
                    process.send_signal(signal.SIGCONT)
                    woken = 0.0
            time.sleep(0.05)
        while any(state(pid) for pid in ranks(folder)):
            if time.monotonic() > deadline:
                self._end(folder, process)
                return -1
            time.sleep(0.05)
        (folder / f"ended.{len(list(folder.glob('ended.*')))}").write_text(str(time.time()))
        return process.wait()

    def _end(self, folder: Path, process: ForkedProcess | Started) -> None:
        for pid in (process.pid, *ranks(folder)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _stop_time(self, folder: Path, start: int) -> float:
        """Seconds from the last hit of a start to the end of all its processes, where the launcher does not restart."""
        ended = float((folder / f"ended.{start}").read_text()) if (folder / f"ended.{start}").exists() else 0.0
        earlier = float((folder / f"ended.{start - 1}").read_text()) if start else 0.0
        struck = [json.loads(file.read_text())["time"] for file in folder.glob("struck.*")]
        within = [moment for moment in struck if earlier < moment < ended]
        return ended - max(within) if within else 0.0

    def _compare(self, layout: str, folder: Path) -> str:
        """`same`, or the first difference to the run that nothing hit; in a process of its own, which has a group."""
        verdict = folder / "verdict"

        def body() -> int:
            whole = self._whole(SAME_AS.get(layout, layout)) / "run"
            verdict.write_text(first_difference(whole, folder / "run", STEPS) or "same")
            return 0

        ForkedProcess(body).wait(LIMIT)
        return verdict.read_text() if verdict.exists() else "not compared"


def write_text(folder: Path) -> None:
    """Small files of words to train on, always the same."""
    draw = random.Random(0)
    folder.mkdir(exist_ok=True)
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(" ".join(draw.choices(WORDS, k=100)) + "\n")


def calls(counts: Iterable[tuple[str, int]]) -> Calls:
    """By kind, how many calls each phase had."""
    found: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for kind, count in counts:
        found[kind].append(max(1, count))
    return found


def ranks(folder: Path) -> list[int]:
    """Process numbers of the ranks of the last start."""
    return [int(file.read_text()) for file in folder.glob("pid.*") if file.read_text()]


def state(pid: int) -> str:
    """`R`, `S`, `T` (stopped) and so on; empty for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[0]


def begun_runs(folder: Path) -> int:
    """Starts that came as far as to write down what they are; under torchrun nothing else tells of them."""
    file = folder / "run" / "environment.json"
    return len(json.loads(file.read_text())["starts"]) if file.exists() else 0


def line(result: Result) -> str:
    """What is printed of a run."""
    hits = "; ".join(
        f"{hit}{'' if struck else ' (not reached)'}"
        for hit, struck in zip(result["hits"], result["struck"], strict=True)
    )
    return (
        f"seed {result['seed']:>4}  {result['layout']:<19}  {result['verdict']:<5} {result['restarts']} restarts, "
        f"{result['seconds']:5.1f} s, stopped in {result['stopped']:4.1f} s  {hits}"
    )


def table(results: Sequence[Result]) -> str:
    """Hits by signal, target and phase, with how many of their runs ended the same."""
    rows: Counter[tuple[str, str]] = Counter()
    good: Counter[tuple[str, str]] = Counter()
    for result in results:
        for signal_, target, kind, struck in zip(
            result["signals"], result["targets"], result["kinds"], result["struck"], strict=True
        ):
            if struck:
                for key in ((f"{signal_} of {'a rank' if target == 'rank' else 'the launcher'}", ""), ("in", kind)):
                    rows[key] += 1
                    good[key] += result["verdict"] == "same"
    listing = [f"{what} {kind}".strip() for what, kind in sorted(rows)]
    width = max(map(len, listing), default=0)
    body = [
        f"{name:<{width}}  {rows[key]:>4} hits, {good[key]:>4} in runs that ended the same"
        for name, key in zip(listing, sorted(rows), strict=True)
    ]
    same = sum(result["verdict"] == "same" for result in results)
    restarts = sum(result["restarts"] for result in results)
    slowest = max((result["stopped"] for result in results), default=0)
    total = (
        f"{len(results)} runs, {sum(map(sum, (result['struck'] for result in results)))} hits, {restarts} restarts; "
        f"{same} ended bit for bit as the run that nothing hit; all stopped within {slowest:.0f} s of a hit"
    )
    return "\n".join([*body, total])


def main(argv: Sequence[str] | None = None) -> int:
    """Do the runs; 1 where one differs."""
    parser = argparse.ArgumentParser(prog="tests.faults.run", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--real", type=int, default=0, help="so many more as a user starts them, 5 at most")
    parser.add_argument("--seed", type=int, help="this one alone, whether it was done or not")
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"))
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    folder = arguments.folder / sources()  # of other code nothing is known
    faults, kept = Faults(folder), folder / "results.jsonl"
    lines = kept.read_text().splitlines() if kept.exists() else []
    done = {result["seed"]: result for result in map(json.loads, lines)}
    begun = time.monotonic()
    counted = {layout: faults.reference(layout) for layout in LAYOUTS}
    seeds = range(arguments.first, arguments.first + arguments.runs)
    jobs: dict[int, Callable[[], Result]] = {seed: partial(faults.run, plan(seed, counted)) for seed in seeds}
    jobs |= {real.seed: partial(faults.run_real, real) for real in reals(arguments.real)}
    if arguments.seed is not None:
        real = {real.seed: partial(faults.run_real, real) for real in reals()}
        jobs = {arguments.seed: real.get(arguments.seed) or partial(faults.run, plan(arguments.seed, counted))}
    results = []
    for seed, job in jobs.items():
        if seed not in done or arguments.seed is not None:
            done[seed] = job()
            with kept.open("a") as file:
                print(json.dumps(done[seed]), file=file)
        results.append(done[seed])
        print(line(done[seed]), flush=True)
    print(f"\n{table(results)}\n{time.monotonic() - begun:.0f} s, in {folder}")
    return int(any(result["verdict"] != "same" for result in results))


if __name__ == "__main__":
    sys.exit(main())
