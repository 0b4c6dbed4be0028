"""The page of the study: `study.md`, `study.csv` and two pictures from the kept runs. Says what is missing yet."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nvfp4_train.comparison.gap import WINDOW, Gap
from nvfp4_train.comparison.pictures import png
from tests.benchmarks.recipes_table import Row as PictureRow
from tests.benchmarks.recipes_table import gap_picture
from tests.benchmarks.study.cells import (
    BASELINE,
    FP8,
    LONG,
    MAIN,
    MOST_ABOVE,
    MXFP4,
    NVFP4,
    TUNE,
    Cell,
    Length,
    Row,
    cells,
    rows,
)
from tests.benchmarks.study.claims import AGREES, DISAGREES, Finding, findings
from tests.benchmarks.study.numbers import Table, read_table
from tests.benchmarks.study.store import OPERANDS, Store

HEAD = (
    "| row | loss | validation | gap to `bf16`, % | gap to `fp8_block`, % | seeds | step time | above 4 bits | zero "
    "weight gradients |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Line:
    """A row of a table: `gap` and `fp8_gap` None where there is nothing to compare with.

    Attributes:
        train_loss, val_loss: nats, of the first seed.
        seed_gaps: to the baseline, percent.
        step_ratio: of the baseline's step, measured by turns (`times`); NaN where it was not.
        above_four: percent of the linears' FLOPs above 4 bits, the output layer aside.
        zeros, flushed: at the end, mean over seeds.
        zeros_worst, flushed_worst: of the first seed.
    """

    row: str
    seeds: tuple[int, ...]
    train_loss: float
    val_loss: float
    gap: Gap | None
    fp8_gap: Gap | None
    seed_gaps: tuple[float, ...]
    step_ratio: float
    above_four: float
    zeros: float
    zeros_worst: float
    flushed: dict[str, float]
    flushed_worst: str


def lines(table: Table) -> list[Line]:
    """The rows of a table: the baseline, then by gap; without a gap last."""
    found = [_line(table, row) for row in table.rows]
    return sorted(found, key=lambda line: (line.row != BASELINE, math.inf if line.gap is None else line.gap.value))


def _line(table: Table, row: str) -> Line:
    records = table.records[row]
    every, first = list(records.values()), records[min(records)]
    return Line(
        row=row,
        seeds=tuple(sorted(records)),
        train_loss=first.train_loss,
        val_loss=first.val_loss,
        gap=None if row == BASELINE else table.gap(row),
        fp8_gap=None if row in (BASELINE, FP8) else table.gap(row, FP8),
        seed_gaps=() if row == BASELINE else tuple(table.gaps(row)),
        step_ratio=table.step_ratios.get(row, math.nan),
        above_four=first.above_four,
        zeros=_mean(one.zeros for one in every),
        zeros_worst=first.zeros_worst,
        flushed={
            name: _mean(one.flushed_shares()[name] for one in every if name in one.flushed_shares())
            for name in OPERANDS
        },
        flushed_worst=first.flushed_worst,
    )


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else math.nan


def shown(gap: Gap | None, none: str = "-") -> str:
    """A gap in a cell."""
    if gap is None:
        return none
    return "diverged" if math.isinf(gap.value) else str(gap)


def number(value: float, form: str) -> str:
    """A number in a cell, `-` where it is not known."""
    return format(value, form) if math.isfinite(value) else "-"


def table_text(found: Sequence[Line]) -> str:
    """The Markdown table of losses and gaps."""
    text = [HEAD]
    for line in found:
        gap = "0" if line.row == BASELINE else shown(line.gap)
        text.append(
            f"| `{line.row}` | {number(line.train_loss, '.4f')} | {number(line.val_loss, '.4f')} | {gap} | "
            f"{shown(line.fp8_gap)} | {len(line.seeds)} | {number(line.step_ratio, '.2f')} | {line.above_four:.1f}% | "
            f"{number(line.zeros, '.2%')} |"
        )
    return "\n".join(text)


def health_text(found: Sequence[Line]) -> str:
    """The Markdown table of flushed shares at the end of a run, and of zeros in the weight gradients."""
    head = ["row", *(name.replace("_", " ") for name in OPERANDS), "worst", "zero weight gradients", "worst linear"]
    text = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for line in found:
        if any(math.isfinite(share) for share in line.flushed.values()):
            shares = " | ".join(number(line.flushed[name], ".2%") for name in OPERANDS)
            share, _, where = line.flushed_worst.partition(" ")
            zeros = f"{number(line.zeros, '.2%')} | {number(line.zeros_worst, '.2%')}"
            text.append(f"| `{line.row}` | {shares} | {float(share):.1%} `{where}` | {zeros} |")
    return "\n".join(text)


def worst_text(found: Sequence[Line]) -> list[str]:
    """Which tensor loses most in NVFP4, beside what was published."""
    worst = [line.flushed_worst for line in found if line.row == NVFP4 and line.flushed_worst]
    if not worst:
        return []
    verdict = AGREES if "out_proj/fprop_input" in worst[0] else DISAGREES
    return [f"Published: Mamba's out_proj loses most, up to 40% (arXiv 2604.12374). Here, in `{NVFP4}`: {verdict}."]


def findings_text(found: Sequence[Finding]) -> str:
    """The Markdown table of what was published beside what was found."""
    text = ["| published | source | here | | verdict |", "|---|---|---|---|---|"]
    for one in found:
        named = ", ".join(f"`{row}`" for row in one.missing)
        verdict = one.verdict if not one.missing else f"missing: {named}"
        text.append(
            f"| {one.claim.said} | {one.claim.source} | {one.claim.measured} | {shown(one.number)} | {verdict} |"
        )
    return "\n".join(text)


def candidates_text(table: Table, every: Sequence[Row]) -> str:
    """What the candidates for a recipe of our own reach: gap against half of NVFP4's, work above 4 bits."""
    text = [
        "| candidate | what | gap over that of `nvfp4` | half of it | above 4 bits (with the output layer) | "
        f"no more than {MOST_ABOVE:.0f}% |\n|---|---|---|---|---|---|"
    ]
    reference = table.gap(NVFP4)
    for row in every:
        gap = table.gap(row.name) if row.name in table.rows else None
        if not row.candidate or gap is None or reference is None:
            continue
        share = gap.value / reference.value
        record = next(iter(table.records[row.name].values()))
        half = "reached" if share <= 0.5 else "missed"
        text.append(
            f"| `{row.name}` | {row.what} | {share:.2f} | {half} | {record.above_four:.1f}% "
            f"({record.above_four_output:.1f}%) | {'kept' if record.above_four <= MOST_ABOVE else 'broken'} |"
        )
    return "\n".join(text) if len(text) > 1 else "None of the candidates has run yet."


def missing_text(table: Table | None, wanted: Sequence[Cell]) -> str:
    """Which cells have no run yet."""
    there = set() if table is None else {(row, seed) for row, seeds in table.records.items() for seed in seeds}
    left = [cell for cell in wanted if (cell.row.name, cell.seed) not in there]
    if not left:
        return f"All {len(wanted)} runs are there."
    by_row: dict[str, list[int]] = {}
    for cell in left:
        by_row.setdefault(cell.row.name, []).append(cell.seed)
    listing = "; ".join(f"`{row}` seed {', '.join(map(str, seeds))}" for row, seeds in by_row.items())
    return f"{len(wanted) - len(left)} of {len(wanted)} runs are there. Missing: {listing}."


def facts(table: Table) -> str:
    """How the runs of a table were made."""
    every = [one for seeds in table.records.values() for one in seeds.values()]
    devices = ", ".join(sorted({one.device for one in every}))
    torch = ", ".join(sorted({one.torch for one in every}))
    steps, tokens = every[0].steps, every[0].tokens
    return (
        f"{steps:,} steps of {tokens // steps:,} tokens, {tokens / 1e6:.0f}M tokens a run; {len(every)} runs on "
        f"{devices}, torch {torch}; set-up {table.setup}, corpus {every[0].corpus}."
    )


def section(table: Table | None, length: Length, every: Sequence[Row], sensitivity: Mapping[int, float]) -> str:
    """All that there is to say about one table."""
    title = f"## {length.tokens_per_parameter:g} tokens a parameter"
    parts = [title, missing_text(table, cells(length, sensitivity))]
    if table is None:
        return "\n\n".join(parts)
    parts.insert(1, facts(table))
    if BASELINE not in table.rows:
        return "\n\n".join([*parts, f"Nothing can be compared before `{BASELINE}` has run."])
    found = lines(table)
    known = [one for one in findings(table) if length is MAIN or not one.missing]
    names = {"Gaps": f"study-{length.name}.png", "Gaps along the run": f"study-{length.name}-curves.png"}
    pictures = [f"![{text}]({name})" for text, name in names.items() if len(found) > 1]
    what = {row.name: row.what for row in every if row.what}
    legend = "\n".join(f"- `{line.row}`: {what[line.row]}" for line in found if line.row in what)
    parts += [table_text(found), *pictures, *([legend] if legend else []), _spread(table)]
    parts += ["### Beside what was published", findings_text(known)]
    match = table.match(MXFP4, NVFP4)
    if match is not None:
        band = "" if match.low is None else f" (band {match.low:.2f} to {match.high:.2f})"
        parts.append(f"For the loss of `nvfp4`, `mxfp4` needs {match.value:.2f} times the tokens{band}.")
    parts += ["### Health at the end", "Share of values that quantization made zero, mean over linears.",
              health_text(found), *worst_text(found)]  # fmt: skip
    if length is MAIN:
        parts += ["### Candidates for a recipe of our own", candidates_text(table, every)]
    return "\n\n".join(parts)


def _spread(table: Table) -> str:
    spread = table.spread
    if not spread.freedom:
        return "One seed a row: nothing is known of the spread between seeds, and there are no bands."
    return (
        f"Spread of a gap from seed to seed: {spread.deviation:.3f} points, pooled over all rows ({spread.freedom} "
        "degrees of freedom)."
    )


def tune_text(table: Table | None) -> str:
    """The grid of learning rates of BF16."""
    if table is None:
        return "The learning rate has not been tuned here yet."
    text = ["| BF16 | loss | validation |", "|---|---|---|"]
    for row, seeds in sorted(table.records.items(), key=lambda item: float(item[0].split()[1])):
        one = next(iter(seeds.values()))
        text.append(f"| {row} | {number(one.train_loss, '.4f')} | {number(one.val_loss, '.4f')} |")
    return f"Learning rates, BF16 alone, {TUNE.tokens_per_parameter:g} tokens a parameter:\n\n" + "\n".join(text)


def picture_rows(found: Sequence[Line]) -> list[PictureRow]:
    """The lines as the picture of recipes takes them; diverged ones left out."""
    return [
        PictureRow(
            recipe=line.row,
            seeds=line.seeds,
            train_loss=line.train_loss,
            val_loss=line.val_loss,
            gap=line.gap if line.gap is not None and math.isfinite(line.gap.value) else None,
            val_gap=None,
            seed_gaps=line.seed_gaps,
            step_ratio=line.step_ratio,
            linear_percent=100 - line.above_four,
        )
        for line in found
    ]


def to_csv(tables: Sequence[Table]) -> str:
    """`study.csv`: a line a row of each table; losses in nats, gaps and shares in percent."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["table", "row", "seeds", "train_loss", "val_loss", "gap", "gap_low", "gap_high", "seed_gaps",
                     "gap_to_fp8_block", "fp8_low", "fp8_high", "step_time_ratio", "above_four_bits_percent",
                     "zero_weight_gradients", *(f"flushed_{name}" for name in OPERANDS)])  # fmt: skip
    for table in tables:
        for line in lines(table):
            writer.writerow([
                table.name, line.row, " ".join(map(str, line.seeds)), *_written(5, line.train_loss, line.val_loss),
                *_ends(line.gap), " ".join(f"{value:.4f}" for value in line.seed_gaps), *_ends(line.fp8_gap),
                *_written(3, line.step_ratio), *_written(2, line.above_four), *_written(5, line.zeros),
                *_written(5, *line.flushed.values()),
            ])  # fmt: skip
    return buffer.getvalue()


def _written(digits: int, *values: float) -> list[str]:
    return [f"{value:.{digits}f}" if math.isfinite(value) else "" for value in values]


def _ends(gap: Gap | None) -> list[str]:
    return (
        ["", "", ""] if gap is None else ["" if end is None else f"{end:.4f}" for end in (gap.value, gap.low, gap.high)]
    )


def loss_picture(table: Table) -> Figure:
    """Gap to the baseline along the run, the core rows, mean over seeds."""
    figure = Figure(figsize=(9, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shares = np.linspace(0.1, 1, 19)
    for row in (FP8, NVFP4, MXFP4):
        if table.pairs(row, BASELINE):
            values = [float(np.mean(table.gaps(row, until=float(share)))) for share in shares]
            axes.plot(shares, values, label=row)
    axes.axhline(0, color="black", linewidth=0.8, label=BASELINE)
    axes.set_xlabel("share of the tokens")
    axes.set_ylabel(f"gap to {BASELINE} over the last {WINDOW:.0%} until there, %")
    axes.legend(frameon=False)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    return figure


def intro(corpus: str) -> str:
    """What the page is and how to read it."""
    return (
        "# Recipes at nano size\n\nWritten by `python -m tests.benchmarks.study report` from `study/`; not edited by "
        "hand.\n\n"
        "A hybrid of 10M parameters (`experiment=nano`) on the text of installed Python packages, trained in every "
        f"recipe and in variants of `nvfp4`, in the same order of batches for the same seed. {corpus}\n\n"
        "Losses in nats a token, of seed 1: training smoothed at the last step, validation after it. Gap: "
        f"training loss over the last {WINDOW:.0%} of tokens against that row with the same seed and batches. Bands "
        "(95%): the mean over a row's seeds, with the spread from seed to seed pooled over all rows. Step time: over "
        "that of `bf16`, by turns in one process (`study/times.csv`), where NVFP4 is emulated; not of rows that change "
        "the precision during a run. Above 4 bits: share of the linears' FLOPs on average over the run, the output "
        "layer aside. Verdicts follow from the bands: a row is worse where its whole band is; two are the same where "
        "the band is within a quarter of a point; a figure is met where the band holds it; open where the band says "
        "neither. Published figures are of other sizes, budgets and baselines."
    )


def write(store: Store, out: Path, sensitivity: Mapping[int, float], corpus: str = "") -> list[str]:
    """Write the page, the CSV and the pictures into `out`; returns what was written."""
    every = rows(sensitivity)
    tables = {length: read_table(store, length.name) for length in (MAIN, LONG)}
    parts = [intro(corpus), tune_text(read_table(store, TUNE.name))]
    parts += [section(table, length, every, sensitivity) for length, table in tables.items()]
    whole = [table for table in tables.values() if table is not None and BASELINE in table.rows]
    files = {"study.md": ("\n\n".join(parts) + "\n").encode(), "study.csv": to_csv(whole).encode()}
    for table in (one for one in whole if len(one.rows) > 1):
        title = f"Gaps at nano size, {table.name} table"
        said = ("one seed", "mean of several seeds; bars: each seed. Bands: spread of seeds, pooled over rows")
        files[f"study-{table.name}.png"] = png(gap_picture(picture_rows(lines(table)), title, said))
        files[f"study-{table.name}-curves.png"] = png(loss_picture(table))
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out / name).write_bytes(content)
    return list(files)
