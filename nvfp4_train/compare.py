"""`python -m nvfp4_train.compare`: runs against a baseline, with a gap that can be trusted. No torch here."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nvfp4_train.exits import ExitCode, guarded
from nvfp4_train.lasting import tell

if TYPE_CHECKING:
    from nvfp4_train.comparison.result import Comparison

EPILOG = """\
BASELINE and each RUN name one configuration: a run folder, several joined by commas (the same configuration in other
seeds), or a folder that holds several run folders of one configuration. Several seeds are compared seed by seed, and
the band is their spread.

Runs are paired when they saw the same batches (data/hash), from the same seed, with the same model. The noise of the
batches then cancels, and gaps of a tenth of a percent can be told apart.

exit codes: 0 done; 2 a mistake, also runs that are not paired without --unpaired; 3 a gap above --max-gap
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="nvfp4_train.compare",
        description="Compares runs with a baseline at equal tokens: gap and band, tokens to match, pictures, a page.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("baseline", metavar="BASELINE", help="run folder (or several seeds) to compare with")
    made.add_argument("runs", metavar="RUN", nargs="+", help="run folder (or several seeds) to compare")
    made.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        required=True,
        help="where compare.json, loss.png, gap.png and report.html go; only an earlier comparison is overwritten",
    )
    made.add_argument(
        "--unpaired", action="store_true", help="compare runs that are not paired, too; says why they are not"
    )
    made.add_argument(
        "--max-gap",
        metavar="PERCENT",
        type=_percent,
        help="exit code 3 when the training or the validation gap of a run is above this, or a run diverged",
    )
    made.add_argument(
        "--wandb", action="store_true", help="log table, pictures and page as a wandb run in the group of the baseline"
    )
    return made


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number; write a percentage, for example 1.0")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = parser().parse_args(argv)
    return guarded(lambda: run(arguments))


def run(arguments: argparse.Namespace) -> ExitCode:
    """Compare, write, and say what came out."""
    from nvfp4_train.comparison.output import check_folder, write_files
    from nvfp4_train.comparison.pictures import gap_figure, loss_figure, png
    from nvfp4_train.comparison.report import about_seeds, html_report, remarks, terminal_table
    from nvfp4_train.comparison.result import compare
    from nvfp4_train.comparison.runs import open_groups
    from nvfp4_train.console import table_console

    check_folder(arguments.out)
    baseline, *groups = open_groups([arguments.baseline, *arguments.runs])
    comparison = compare(baseline, groups, unpaired=arguments.unpaired)
    loss, gap = png(loss_figure(comparison)), png(gap_figure(comparison))
    files = {
        "compare.json": (json.dumps(comparison.to_json(), indent=1, allow_nan=False) + "\n").encode(),
        "loss.png": loss,
        "gap.png": gap,
        "report.html": html_report(comparison, {"Loss": loss, "Gap": gap}).encode(),
    }
    write_files(arguments.out, files)
    console = table_console()
    console.print(terminal_table(comparison, console.encoding))
    for line in filter(None, (*remarks(comparison), about_seeds(comparison))):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"written to {arguments.out}: {', '.join(files)}", markup=False, soft_wrap=True)
    if arguments.wandb:
        from nvfp4_train.comparison.dashboard import log_comparison

        log_comparison(comparison, arguments.out, files, lambda text: console.print(text, markup=False))
    return _verdict(comparison, arguments.max_gap)


def _verdict(comparison: Comparison, limit: float | None) -> ExitCode:
    """The exit code that --max-gap asks for, and a line on standard error for each run above it."""
    above = [] if limit is None else [run for run in comparison.runs if run.exceeds(limit)]
    for result in above:
        gaps = {
            name: measured.gap.value for name, measured in (("train", result.train), ("val", result.val)) if measured
        }
        what = ", ".join(f"{name} gap {value:+.3f}%" for name, value in gaps.items()) if result.train else "diverged"
        tell(f"{result.name}: {what}; above --max-gap {limit}")
    return ExitCode.GAP if above else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
