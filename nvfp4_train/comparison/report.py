"""`report.html`, the whole comparison on a page that needs neither network nor scripts; and the table on a terminal."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.table import Table

from nvfp4_train.comparison.gap import CONFIDENCE, WINDOW
from nvfp4_train.comparison.pictures import heat_figure, png
from nvfp4_train.comparison.quant import heat_maps, tensors
from nvfp4_train.comparison.result import Comparison, Measured, RunResult
from nvfp4_train.comparison.runs import config_differences

LOSS = "loss: baseline → run"
HEADINGS = ("run", "paired", "seeds", f"train {LOSS}", "train gap (%)", f"val {LOSS}", "val gap (%)", "tokens to match")


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """One row of texts a run, under HEADINGS."""
    return [_row(run) for run in comparison.runs]


def _row(run: RunResult) -> tuple[str, ...]:
    seeds = ", ".join("?" if pair[1].seed is None else str(pair[1].seed) for pair in run.pairs)
    missing = "diverged" if run.train is None else "-"
    return (
        run.name,
        "yes" if run.paired else "no",
        seeds,
        _loss(run.train) if run.train else missing,
        str(run.train.gap) if run.train else missing,
        _loss(run.val) if run.val else "-",
        str(run.val.gap) if run.val else "-",
        "not reached" if run.match.factor is None else f"x {run.match.factor:.2f}",
    )


def _loss(measured: Measured) -> str:
    return f"{measured.baseline_loss:.4f} → {measured.run_loss:.4f}"


def terminal_table(comparison: Comparison, encoding: str = "utf-8") -> Table:
    """The table of runs for a terminal, in letters that it has."""
    table = Table(title=f"baseline: {comparison.baseline.name}", title_justify="left")
    for index, heading in enumerate(HEADINGS):
        table.add_column(_spelt(heading, encoding), justify="left" if index == 0 else "right", overflow="fold")
    for row in table_rows(comparison):
        table.add_row(*(_spelt(text, encoding) for text in row))
    return table


def _spelt(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("→", "->").replace("±", "+-")
    return text


def remarks(comparison: Comparison) -> list[str]:
    """Lines below the table: reasons of unpaired runs, factors that were not reached, notes."""
    lines = []
    for run in comparison.runs:
        lines += [f"{run.name} is not paired: {reason}" for reason in run.reasons]
        if run.match.reason:
            lines.append(f"{run.name}: tokens to match {run.match.reason}")
        lines += run.notes
    return list(dict.fromkeys(lines))


def about_seeds(comparison: Comparison) -> str:
    """What bands of single pairs do not know; empty where every band comes from several seeds."""
    if all(run.band == "seeds" for run in comparison.runs):
        return ""
    return (
        "The band of one pair does not say how far another seed would land, which may be well outside of it: to tell "
        "recipes apart, give several seeds of each, joined by commas."
    )


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; margin: 1em 0; font-size: .92em; }
th, td { border-bottom: 1px solid #ddd; padding: .35em .8em; text-align: right; vertical-align: top; }
th { background: #f4f4f4; } th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; } .note { color: #555; }
td.text { text-align: left; font-family: monospace; overflow-wrap: anywhere; }
"""


def html_report(comparison: Comparison, pictures: Mapping[str, bytes]) -> str:
    """The page. `pictures`: PNG by title; they are put into the page itself."""
    sections = [
        f"<h1>{escape(', '.join(run.name for run in comparison.runs))} against {escape(comparison.baseline.name)}</h1>",
        _html_table(HEADINGS, table_rows(comparison)),
        f'<p class="note">{_explanation(comparison)}</p>',
        *(f"<p>{escape(line)}</p>" for line in remarks(comparison)),
        *(f"<h2>{escape(title)}</h2>{_image(title, content)}" for title, content in pictures.items()),
        *_coverage(comparison),
        *_differences(comparison),
        *_health(comparison),
    ]
    title = escape(f"Gap to {comparison.baseline.name}")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(sections) + "\n</body></html>\n"
    )


def _explanation(comparison: Comparison) -> str:
    text = (
        f"Gap: 100 * (run - baseline) / baseline, mean over the last {WINDOW:.0%} of the shorter run at equal tokens; "
        f"above 0 the run is worse. Band: {CONFIDENCE:.0%}, "
    )
    bands = {run.band for run in comparison.runs}
    if bands == {"seeds"}:
        text += "from the spread of the seeds. "
    else:
        seeds = ", or from the spread of the seeds where there are several" if "seeds" in bands else ""
        text += f"from the noise of the difference of the two runs{seeds}. {about_seeds(comparison)} "
    return escape(
        text + "Tokens to match: how many times the baseline's tokens the run needs for the same smoothed loss."
    )


def _html_table(headings: Sequence[str], rows: Sequence[Sequence[str]], cell_class: str = "") -> str:
    attribute = f' class="{cell_class}"' if cell_class else ""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td{attribute}>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def _image(title: str, content: bytes) -> str:
    return f'<img alt="{escape(title)}" src="data:image/png;base64,{base64.b64encode(content).decode()}">'


def _first_runs(comparison: Comparison) -> list[Any]:
    """The baseline's and each run's first seed."""
    return [comparison.baseline.runs[0], *(run.pairs[0][1] for run in comparison.runs)]


def _coverage(comparison: Comparison) -> list[str]:
    """What ran in low precision, of the runs whose precision.json says so."""
    rows = []
    for run in _first_runs(comparison):
        coverage = (run.precision or {}).get("coverage")
        if isinstance(coverage, dict):
            formats = coverage.get("by_format") or {}
            parts = ", ".join(f"{name} {share:.1f}%" for name, share in formats.items())
            shares = [f"{coverage[key]:.1f}" if key in coverage else "-" for key in ("linear_percent", "total_percent")]
            rows.append((run.name, str(run.precision.get("recipe", "-")), *shares, parts))
    if not rows:
        return []
    headings = ("run", "recipe", "% of linear GEMM FLOPs", "% of all FLOPs", "formats, of linear GEMM FLOPs")
    return ["<h2>What ran in low precision</h2>", _html_table(headings, rows)]


def _differences(comparison: Comparison) -> list[str]:
    """Configuration keys in which runs differ from the baseline, one column a run."""
    baseline, *runs = _first_runs(comparison)
    runs = [run for run in runs if run.config is not None]
    if baseline.config is None or not runs:
        return []
    differing = [config_differences(baseline, run) for run in runs]
    keys = list(dict.fromkeys(key for found in differing for key in found))
    if not keys:
        return ["<h2>Configuration</h2><p>No differences.</p>"]
    same = "(same)"
    rows = []
    for key in keys:
        base = next(found[key][0] for found in differing if key in found)
        rows.append((key, str(base), *(str(found[key][1]) if key in found else same for found in differing)))
    return [
        "<h2>Configuration differences</h2>",
        _html_table(("key", baseline.name, *(run.name for run in runs)), rows, "text"),
    ]


def _health(comparison: Comparison) -> list[str]:
    sections = []
    for run in _first_runs(comparison):
        for heat in heat_maps(tensors(run.quant)):
            title = f"{run.name}: {heat.title}"
            sections.append(f"<h2>{escape(title)}</h2>{_image(title, png(heat_figure(heat)))}")
    return sections
