"""What the runs of `recipes.py` say: rows; these as CSV, as a picture, as a page, and in the pages of the recipes."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nvfp4_train.comparison.gap import WINDOW, Gap, align, window_gap
from nvfp4_train.comparison.match import smooth
from nvfp4_train.comparison.pictures import BASELINE_COLOR, COLORS
from nvfp4_train.comparison.result import RunResult, compare
from nvfp4_train.comparison.runs import Group, Run

BASELINE = "bf16"
HEAD = "| recipe | final loss | gap to `bf16` | step time over `bf16` |\n|---|---|---|---|"
WHOLE_HEAD = (
    "| recipe | final training loss | validation loss | gap to `bf16` in % | seeds | step time over `bf16` | "
    "linear FLOPs in low precision |\n|---|---|---|---|---|---|---|"
)
PLACE = re.compile(r"(<!-- measured-here: ([\w ]+) -->\n).*?(<!-- /measured-here -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One recipe.

    Attributes:
        seeds: of its runs, the smallest first.
        train_loss, val_loss: of the first seed (1), in nats: the smoothed loss at the last step, the last validation.
        gap, val_gap: to the baseline of the same seeds, in percent; None for the baseline, and where a run diverged.
        seed_gaps: training gap of each seed.
        step_ratio: step time over that of the baseline.
        linear_percent: share of linear FLOPs in low precision.
    """

    recipe: str
    seeds: tuple[int, ...]
    train_loss: float
    val_loss: float
    gap: Gap | None
    val_gap: Gap | None
    seed_gaps: tuple[float, ...]
    step_ratio: float
    linear_percent: float

    @property
    def gap_text(self) -> str:
        """`+1.08 ± 0.11`."""
        return "0" if self.recipe == BASELINE else "diverged" if self.gap is None else str(self.gap)


def make_rows(groups: Mapping[str, Group], step_ratios: Mapping[str, float]) -> list[Row]:
    """A row for each recipe, the baseline first, then by gap; diverged ones last. `groups` holds the baseline, too."""
    others = [name for name in groups if name != BASELINE]
    results = dict(zip(others, compare(groups[BASELINE], [groups[name] for name in others]).runs, strict=True))
    rows = [_row(name, group, results.get(name), step_ratios[name]) for name, group in groups.items()]
    return sorted(rows, key=lambda row: (row.recipe != BASELINE, row.gap is None, row.gap.value if row.gap else 0.0))


def _row(recipe: str, group: Group, result: RunResult | None, step_ratio: float) -> Row:
    runs = sorted(group.runs, key=lambda run: run.seed or 0)
    train, val = (result.train, result.val) if result else (None, None)
    return Row(
        recipe=recipe,
        seeds=tuple(run.seed or 0 for run in runs),
        train_loss=float(smooth(runs[0].train)[-1]),
        val_loss=float(runs[0].val.losses[-1]),
        gap=train.gap if train else None,
        val_gap=val.gap if val else None,
        seed_gaps=tuple(pair_gap(*pair) for pair in result.pairs) if result and train else (),
        step_ratio=step_ratio,
        linear_percent=float((runs[0].precision or {})["coverage"]["linear_percent"]),
    )


def pair_gap(baseline: Run, run: Run) -> float:
    """Training gap of one pair, in percent."""
    return window_gap(align(baseline.train, run.train)).value


def worse_or_not(better: Group, worse: Group) -> str:
    """One sentence: whether `worse` is worse than `better` on the mean of their seeds, and by how much."""
    (result,) = compare(better, [worse]).runs
    if result.train is None:
        return f"`{worse.name}` diverged."
    gap, seeds = result.train.gap, [pair[1].seed for pair in result.pairs]
    each = ", ".join(f"{pair_gap(*pair):+.3f}" for pair in result.pairs)
    on = f"the mean of seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]} alone"
    text = f"On {on}, the gap of `{worse.name}` to `{better.name}` in training loss is {gap} % (each: {each}): "
    if gap.value <= 0:
        return f"{text}`{worse.name}` is NOT worse, by {-gap.value:.3f} %."
    sure = gap.low is not None and gap.low > 0
    return f"{text}`{worse.name}` is worse" + ("." if sure else ", but the band holds zero.")


def to_csv(rows: Sequence[Row]) -> str:
    """One line a recipe; losses in nats, gaps in percent."""
    names = ("recipe", "seeds", "train_loss", "val_loss", "gap", "gap_low", "gap_high", "seed_gaps", "val_gap",
             "step_time_ratio", "linear_flops_percent")  # fmt: skip
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        gap = row.gap or Gap(0.0 if row.recipe == BASELINE else float("nan"))
        val_gap = "" if row.val_gap is None else f"{row.val_gap.value:.4f}"
        band = ["" if end is None else f"{end:.4f}" for end in (gap.low, gap.high)]
        writer.writerow([
            row.recipe, " ".join(map(str, row.seeds)), f"{row.train_loss:.5f}", f"{row.val_loss:.5f}",
            f"{gap.value:.4f}", *band, " ".join(f"{value:.4f}" for value in row.seed_gaps), val_gap,
            f"{row.step_ratio:.3f}", f"{row.linear_percent:.2f}",
        ])  # fmt: skip
    return buffer.getvalue()


def whole_page(rows: Sequence[Row], facts: Sequence[str]) -> str:
    """The page of all recipes: `facts` (how it was measured, what it says), then the table."""
    lines = [
        f"| `{row.recipe}` | {row.train_loss:.4f} | {row.val_loss:.4f} | {row.gap_text} | {len(row.seeds)} | "
        f"{row.step_ratio:.2f} | {row.linear_percent:.1f}% |"
        for row in rows
    ]
    title = "# Every recipe at quickstart size\n\nWritten by `make recipes`; not edited by hand."
    return "\n\n".join([title, *facts, "\n".join([WHOLE_HEAD, *lines]), "![Gaps](recipes.png)"]) + "\n"


def reading() -> str:
    """How to read losses and gaps."""
    return (
        "Losses in nats a token, of seed 1: training smoothed at the last step, validation after it. Gap: training "
        f"loss over the last {WINDOW:.0%} of tokens against `bf16` of the same seed and batches, with a 95% band. With "
        "one seed the band is the noise of the two runs' difference and does not speak of other seeds; with several, "
        "gap and band are the mean and the spread of theirs. Step time: median ratio of steps by turns in one process."
    )


def fill_page(text: str, rows: Mapping[str, Row], caption: str) -> str:
    """A recipe page with its tables between `measured-here` marks filled; the same again when filled again.

    Raises ValueError where the page has no such marks, or names a recipe that has no row.
    """

    def table(match: re.Match[str]) -> str:
        names = match[2].split()
        missing = [name for name in names if name not in rows]
        if missing:
            raise ValueError(f"measured-here: {', '.join(missing)} is none of the measured {', '.join(rows)}")
        lines = [_short_line(rows[name]) for name in names]
        return match[1] + "\n".join([HEAD, *lines, "", caption]) + "\n" + match[3]

    filled, count = PLACE.subn(table, text)
    if not count:
        raise ValueError("no table between `<!-- measured-here: NAMES -->` and `<!-- /measured-here -->`")
    return filled


def _short_line(row: Row) -> str:
    gap = row.gap_text if row.gap is None else f"{row.gap} %"
    seeds = f" ({len(row.seeds)} seeds)" if len(row.seeds) > 1 and row.gap is not None else ""
    return f"| `{row.recipe}` | {row.train_loss:.4f} | {gap}{seeds} | {row.step_ratio:.2f} |"


NOISE_OR_SPREAD = (
    "one seed; band: noise of the paired difference",
    "mean of several seeds; band: their spread; bars: each seed",
)


def gap_picture(rows: Sequence[Row], title: str, legend: tuple[str, str] = NOISE_OR_SPREAD) -> Figure:
    """Gaps with their bands, the smallest on top; a dot for each seed where there are several.

    Args:
        legend: what a row of one seed, and of several, shows.
    """
    shown = [row for row in rows if row.gap is not None]
    figure = Figure(figsize=(9, 1.5 + 0.36 * len(shown)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for height, row in enumerate(shown):
        assert row.gap is not None
        color = COLORS[1] if len(row.seeds) == 1 else COLORS[0]
        axes.errorbar(row.gap.value, height, xerr=row.gap.half_width, fmt="o" if len(row.seeds) == 1 else "s",
                      color=color, capsize=4, markersize=6)  # fmt: skip
        if len(row.seeds) > 1:
            axes.plot(row.seed_gaps, [height] * len(row.seed_gaps), "|", color=BASELINE_COLOR, markersize=9, zorder=4)
        axes.text(1.01, height, str(row.gap), transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    axes.axvline(0, color=BASELINE_COLOR, linewidth=1)
    axes.set_yticks(range(len(shown)), [row.recipe for row in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel(f"gap to {BASELINE} (% of its training loss over the last {WINDOW:.0%}; right of 0: worse)")
    axes.set_title(title, loc="left", fontsize=12)
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.plot([], [], "o", color=COLORS[1], label=legend[0])
    axes.plot([], [], "s", color=COLORS[0], label=legend[1])
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return figure
