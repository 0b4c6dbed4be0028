"""Recipes and their variants at nano size, paired by seed, against BF16 and beside what was published. make study

    run [OVERRIDE ...]     prepare the text, train the next cells of the tables, write the page; again goes on
    report                 write the page, the CSV and the pictures from what is kept
    sensitivity [RUN]      what each block of a BF16 run loses when it alone is quantized
    times                  step time of each row over that of BF16, for rows that have none yet
    cells [OVERRIDE ...]   what is trained, as it is typed

Kept in --results (tests/benchmarks/results): study/runs.csv, study/curves, study/sensitivity.csv, study/times.csv,
study/corpus.csv, study/tokenizer.json, and study.md, study.csv and pictures made from them. Run folders are in --folder
(runs/study) and may be deleted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from models.shapes import block_letters
from nvfp4_train.config import ConfigError
from nvfp4_train.exits import ExitCode, guarded
from nvfp4_train.run_records import load_config
from nvfp4_train.storage import write_atomic
from tests.benchmarks.study import page, sensitivity, text, times
from tests.benchmarks.study.cells import (
    BASELINE,
    LENGTHS,
    MAIN,
    MOST_ABOVE,
    Length,
    Plan,
    cell_name,
    cells,
    choose_blocks,
    rows,
)
from tests.benchmarks.study.runner import Queue, missing, run_cells, slots
from tests.benchmarks.study.store import Store
from tests.benchmarks.training_runs import ROOT

RESULTS, FOLDER = ROOT / "tests" / "benchmarks" / "results", ROOT / "runs" / "study"
CORPUS_LINE = "corpus.txt"


def say(line: str) -> None:
    """A line at once, also into a pipe."""
    print(line, flush=True)


def kept(arguments: argparse.Namespace) -> Path:
    """Where runs are kept."""
    folder: Path = arguments.results.resolve() / "study"
    return folder


def report(arguments: argparse.Namespace) -> int:
    """Write the page."""
    folder = kept(arguments)
    line = folder / CORPUS_LINE
    corpus = line.read_text().strip() if line.is_file() else ""
    written = page.write(Store(folder), arguments.results, sensitivity.read(folder), corpus)
    say(f"written to {arguments.results}: {', '.join(written)}")
    return ExitCode.DONE


def run(arguments: argparse.Namespace) -> int:
    """Train the next cells."""
    started, folder = time.monotonic(), kept(arguments)
    devices = _devices(" --gpus 0 starts it all the same.") if arguments.gpus is None else arguments.gpus
    deadline = None if arguments.minutes is None else started + 60 * arguments.minutes
    # The tokenizer is kept with the runs: half a megabyte, and half a minute less on a machine that starts bare.
    overrides = [f"data.tokenizer={folder / text.TOKENIZER}", *arguments.overrides]
    corpus = text.prepared(overrides, say)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / text.FILE, text.to_csv(corpus))
    write_atomic(folder / CORPUS_LINE, text.describe(corpus) + "\n")
    say(f"{text.describe(corpus)} Ready after {time.monotonic() - started:.0f} s.")
    store, measured = Store(folder), sensitivity.read(folder)
    shared = [*overrides, *text.shared_overrides(corpus)]
    records, wanted = store.records(), []
    for length in _lengths(arguments.tables):
        plan = Plan.make(length, shared, corpus.hash, arguments.steps)
        chosen = [cell for cell in cells(length, measured) if fnmatch(cell.name, arguments.only)]
        wanted += missing(plan, chosen, records)
    places = slots(devices, arguments.jobs, len(os.sched_getaffinity(0)))
    pace = {one.row: one.seconds / one.tokens for one in records if one.jobs == len(places)}
    say(f"{len(wanted)} runs to train, {len(places)} at once on {devices or 'no'} GPU(s)")
    failures = run_cells(Queue(deque(wanted), deadline, pace), places, arguments.folder.resolve(), store, say)
    report(arguments)
    if failures:
        print("\n\n".join(failures), file=sys.stderr)
    return ExitCode.INTERNAL if failures else ExitCode.DONE


def measure_sensitivity(arguments: argparse.Namespace) -> int:
    """Score each block, keep the result, and say which blocks it chooses."""
    folder, source = kept(arguments), arguments.run or _baseline_run()
    differences = sensitivity.measure(source, arguments.recipe, arguments.sequences, say)
    letters = block_letters(load_config(source).model)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / sensitivity.FILE, sensitivity.to_csv(differences, letters, arguments.recipe))
    for block, difference in differences.items():
        say(f"block {block:2d} {letters[block]}  {1e3 * difference:+8.3f} millinats")
    chosen = choose_blocks(differences, load_config(source), MOST_ABOVE)
    say(f"to keep in BF16 within {MOST_ABOVE:g}% of the linears' FLOPs: blocks {chosen or 'none'}")
    return ExitCode.DONE


def measure_times(arguments: argparse.Namespace) -> int:
    """Time the rows that have no step time yet, keeping each at once."""
    _devices()
    started, folder = time.monotonic(), kept(arguments)
    known = times.read(folder)
    wanted = times.configurations(rows(sensitivity.read(folder)))
    left = {name: config for name, config in wanted.items() if name not in known or name == BASELINE}
    folder.mkdir(parents=True, exist_ok=True)
    for name, milliseconds, ratio in times.measure(left) if len(left) > 1 else ():
        known[name] = (milliseconds, ratio)
        write_atomic(folder / times.FILE, times.to_csv(known))
        say(f"{name:<28} {milliseconds:8.2f} ms  {ratio:.3f} x {BASELINE}")
        if arguments.minutes is not None and time.monotonic() > started + 60 * arguments.minutes:
            break
    return report(arguments)


def _baseline_run() -> Path:
    """The newest run of the baseline."""
    pattern = f"{cell_name(MAIN.name, BASELINE, 1)}-*/checkpoints"
    found = sorted(FOLDER.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(
            f"There is no {FOLDER / pattern}: train it (`run --only '*-bf16-seed1'`), or name a BF16 run."
        )
    return found[-1].parent


def list_cells(arguments: argparse.Namespace) -> int:
    """Print what is trained."""
    measured = sensitivity.read(kept(arguments))
    for length in _lengths(arguments.tables):
        plan = Plan.make(length, arguments.overrides, "")
        for cell in cells(length, measured):
            typed = [override if " " not in override else f"'{override}'" for override in plan.overrides(cell, Path())]
            say(f"{cell.name}: {' '.join(one for one in typed if not one.startswith('run_dir='))}")
    return ExitCode.DONE


def _lengths(names: str) -> list[Length]:
    return [length for length in LENGTHS if length.name in names.split(",")]


def _devices(way_out: str = "") -> int:
    """GPUs of this machine; ConfigError where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"The study is of GPUs and there is none here: on a CPU one run takes days.{way_out}")
    return torch.cuda.device_count()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="tests.benchmarks.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--results", type=Path, default=RESULTS, help="where what is kept and the page are")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    running = commands.add_parser("run", help="train the next cells")
    running.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of all cells, as for nvfp4_train.train")
    running.add_argument("--minutes", type=float, help="stop after so many, the text's preparation included")
    running.add_argument("--jobs", type=int, default=2, help="runs at a time on each GPU, or on the CPU (default 2)")
    running.add_argument("--gpus", type=int, help="how many to use (default: all that are visible)")
    running.add_argument("--tables", default="main,long", help="some of main, long, tune (default main,long)")
    running.add_argument("--only", default="*", help="glob on the names of cells, such as 'main-nvfp4-*'")
    running.add_argument("--steps", type=int, help="of every run, to try it out")
    running.add_argument("--folder", type=Path, default=FOLDER, help="of the runs")
    running.set_defaults(command=run)
    commands.add_parser("report", help="write the page").set_defaults(command=report)
    scoring = commands.add_parser("sensitivity", help="score block by block")
    scoring.add_argument("run", nargs="?", type=Path, help="BF16 run folder (default: seed 1 in runs/study)")
    scoring.add_argument("--recipe", default="nvfp4", help="to quantize a block in (default nvfp4)")
    scoring.add_argument("--sequences", type=int, default=512, help="of validation text (default 512)")
    scoring.set_defaults(command=measure_sensitivity)
    timing = commands.add_parser("times", help="time the steps of rows")
    timing.add_argument("--minutes", type=float, help="begin no row after so many")
    timing.set_defaults(command=measure_times)
    listing = commands.add_parser("cells", help="print what is trained")
    listing.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    listing.add_argument("--tables", default="main,long,tune")
    listing.set_defaults(command=list_cells)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    arguments = parser().parse_args(argv)
    return guarded(lambda: arguments.command(arguments))


if __name__ == "__main__":
    sys.exit(main())
