"""The pictures of a comparison: curves, gaps, and the heat map of quantization health.

Figures are built as objects, without pyplot's global state. Colours are Okabe and Ito's, which colour-blind readers
tell apart; the baseline is black.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from nvfp4_train.comparison.gap import WINDOW, align, before_window, gap_curve
from nvfp4_train.comparison.match import smooth
from nvfp4_train.comparison.quant import HeatMap
from nvfp4_train.comparison.result import Comparison, RunResult
from nvfp4_train.comparison.runs import Run

COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES = ("-", "--", "-.", ":")
BASELINE_COLOR = "#000000"
MAX_POINTS = 4000
SHOWN_FROM = 0.02  # of the tokens: the axes are scaled to what comes after
SHOWN_GAPS_FROM = 0.2


def _style(index: int) -> dict[str, Any]:
    """Colour and dashes of the run number `index`: colours first, then dashes."""
    return {"color": COLORS[index % len(COLORS)], "linestyle": LINES[index // len(COLORS) % len(LINES)]}


def _figure(title: str, y_label: str, width: float = 10, height: float = 5.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel("tokens")
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _add_legend(figure: Figure) -> None:
    """Below the axes, where it hides nothing."""
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9)


def _in_legend(label: str) -> str:
    """Matplotlib leaves out what begins with `_`, as a folder's name may."""
    return f" {label}" if label.startswith("_") else label


def png(figure: Figure) -> bytes:
    """The figure as the content of a PNG file."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # in a run's name a `$` begins no formula
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _thin(*columns: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """At most 4000 points of each column: more than the picture has dots."""
    step = -(-len(columns[0]) // MAX_POINTS)
    return tuple(column[::step] for column in columns)


def loss_figure(comparison: Comparison) -> Figure:
    """Training loss over tokens: smoothed curves over raw values, validation as dots, final losses in the legend."""
    figure, axes = _figure(
        f"Training loss, smoothed; dots: validation; legend: mean over the last {WINDOW:.0%}", "loss (nats)"
    )
    lows: list[float] = []
    highs: list[float] = []

    def draw(run: Run, label: str | None, style: dict[str, Any], raw: bool) -> None:
        curve = run.train.finite()
        if not len(curve):
            return
        tokens, smoothed, losses = _thin(curve.tokens, smooth(curve), curve.losses)
        if raw:
            axes.plot(tokens, losses, color=style["color"], linewidth=0.5, alpha=0.15, zorder=1)
        axes.plot(tokens, smoothed, label=label, linewidth=1.6, zorder=3, **style)
        val = run.val.finite()
        axes.plot(val.tokens, val.losses, "o", markersize=3, color=style["color"], alpha=0.7, zorder=2)
        shown = smoothed[tokens >= SHOWN_FROM * tokens[-1]]
        lows.append(min(shown.min(), *val.losses) if len(val) else shown.min())
        highs.append(shown.max())

    runs_in_all = len(comparison.baseline.runs) + sum(len(result.pairs) for result in comparison.runs)
    for index, run in enumerate(comparison.baseline.runs):
        draw(run, None if index else _in_legend(comparison.baseline.name), {"color": BASELINE_COLOR}, runs_in_all <= 4)
    for number, result in enumerate(comparison.runs):
        for index, (_, run) in enumerate(result.pairs):
            draw(run, None if index else _loss_label(result), _style(number), runs_in_all <= 4)
    _set_range(axes, lows, highs)
    _mark_switches(axes, comparison)
    _add_legend(figure)
    return figure


def _loss_label(result: RunResult) -> str:
    if result.train is None:
        return _in_legend(f"{result.name}: diverged")
    return _in_legend(f"{result.name}: {result.train.run_loss:.4f} (baseline {result.train.baseline_loss:.4f})")


def _set_range(axes: Axes, lows: Sequence[float], highs: Sequence[float]) -> None:
    """Scale to what is worth seeing, with a margin: the first steps of a run would squeeze everything else flat."""
    if lows and highs:
        low, high = min(lows), max(highs)
        margin = 0.06 * (high - low) or 0.01
        axes.set_ylim(low - margin, high + margin)
    axes.margins(x=0.01)


def _mark_switches(axes: Axes, comparison: Comparison) -> None:
    """A vertical line at each switch of precision; switches at the same tokens share one."""
    names: dict[int, list[str]] = {}
    colors: dict[int, str] = {}
    marked = [(run, BASELINE_COLOR) for run in comparison.baseline.runs[:1]]
    marked += [(result.pairs[0][1], _style(number)["color"]) for number, result in enumerate(comparison.runs)]
    for run, color in marked:
        for switch in run.switches:
            names.setdefault(switch.tokens, []).append(f"{run.name}: {switch.text}")
            colors.setdefault(switch.tokens, color)
    for tokens, texts in names.items():
        axes.axvline(tokens, color=colors[tokens], linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        text = "\n".join(dict.fromkeys(texts))
        axes.annotate(
            text, (tokens, 1), xycoords=("data", "axes fraction"), xytext=(-3, -2), textcoords="offset points",
            ha="right", va="top", fontsize=7.5, color=colors[tokens],
        )  # fmt: skip


def gap_figure(comparison: Comparison) -> Figure:
    """Relative gap over tokens: at each place that of the last 10% until there, with its band; dots are validation.

    Several seeds have a thin line each, and the band of their spread at the end.
    """
    title = f"Gap to {comparison.baseline.name}; each point: the last {WINDOW:.0%} until there; dots: validation"
    figure, axes = _figure(title, "gap (% of the baseline's loss; above 0: worse)")
    heights = [np.zeros(1)]
    for number, result in enumerate(comparison.runs):
        heights += _draw_gap(axes, result, _style(number))
    ends = {min(pair[0].train.tokens[-1], pair[1].train.tokens[-1]) for run in comparison.runs for pair in run.pairs}
    for end in ends:
        axes.axvspan(before_window(int(end)), end, color="#888888", alpha=0.12, linewidth=0, zorder=0)
    axes.axhline(0, color=BASELINE_COLOR, linewidth=1)
    _set_range(axes, [float(np.nanmin(values)) for values in heights], [float(np.nanmax(values)) for values in heights])
    _mark_switches(axes, comparison)
    _add_legend(figure)
    return figure


def _draw_gap(axes: Axes, result: RunResult, style: dict[str, Any]) -> list[NDArray[np.float64]]:
    """Draw one run; returns the heights that must be visible."""
    if result.train is None:
        axes.plot([], [], label=_in_legend(f"{result.name}: diverged"), **style)
        return []
    gap, color, single = result.train.gap, style["color"], len(result.pairs) == 1
    heights = []
    for index, (baseline, run) in enumerate(result.pairs):
        tokens, gaps = gap_curve(align(baseline.train, run.train))
        values = np.array([gap.value for gap in gaps])
        label = None if index else _gap_label(result)
        axes.plot(tokens, values, label=label, linewidth=1.6 if single else 0.9, **style)
        low, high = values, values
        if single:  # a gap that has no band keeps its line
            low = np.array([gap.value if gap.low is None else gap.low for gap in gaps])
            high = np.array([gap.value if gap.high is None else gap.high for gap in gaps])
            axes.fill_between(tokens, low, high, color=color, alpha=0.18, linewidth=0)
        shown = tokens >= SHOWN_GAPS_FROM * tokens[-1]
        heights += [low[shown], high[shown]]
        val = align(baseline.val, run.val)
        if len(val):
            dots = 100 * (val.run - val.baseline) / val.baseline
            axes.plot(val.tokens, dots, "o", markersize=3.5, markerfacecolor="white", color=color, alpha=0.8)
            heights.append(dots[-1:])
    if not single:
        axes.errorbar(tokens[-1], gap.value, yerr=gap.half_width, color=color, capsize=5, marker="s")
        heights.append(np.array([gap.low, gap.high], dtype=float))
    return heights


def _gap_label(result: RunResult) -> str:
    assert result.train is not None
    return _in_legend(f"{result.name}: {result.train.gap} %" + ("" if result.paired else " (unpaired)"))


def heat_figure(heat: HeatMap) -> Figure:
    """Quantization health by block (across) and operand (down)."""
    rows, columns = heat.values.shape
    figure = Figure(figsize=(3.2 + 0.32 * columns, 1.6 + 0.27 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(
        heat.values, cmap="cividis" if heat.high_is_bad else "cividis_r", aspect="auto", interpolation="nearest"
    )
    axes.set_facecolor("#eeeeee")
    axes.set_xticks(range(columns), heat.columns, fontsize=7)
    axes.set_yticks(range(rows), heat.rows, fontsize=7)
    axes.set_xlabel("block")
    axes.set_title(heat.title, loc="left", fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.9, label=heat.unit)
    return figure
