"""What the pictures show, read off the figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from nvfp4_train.comparison.pictures import gap_figure, loss_figure, png
from nvfp4_train.comparison.report import html_report
from nvfp4_train.comparison.result import Comparison, compare
from nvfp4_train.comparison.runs import open_groups
from tests.comparison.synthetic import TOKENS_PER_STEP, config, losses, make_run

STEPS = 300
SWITCH = {240: {"precision/forward": "bf16", "precision/backward": "recipe"}}


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    other = config(precision={"name": "mxfp4"})
    make_run(tmp_path / "base", losses(steps=STEPS), settings=config(), val={100: 3.0, 300: 2.5})
    values = losses(steps=STEPS, own_seed=1, gap=1.0)
    make_run(tmp_path / "run", values, settings=other, val={100: 3.3, 300: 2.6}, extra=SWITCH)
    baseline, *groups = open_groups([str(tmp_path / "base"), str(tmp_path / "run")])
    return compare(baseline, groups)


def vertical_lines(figure: Figure) -> list[float]:
    axes = figure.axes[0]
    drawn = [np.asarray(line.get_xdata(), dtype=float) for line in axes.lines]
    return [float(places[0]) for places in drawn if len(places) and np.ptp(places) == 0]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in (*figure.axes[0].texts, *figure.legends[0].get_texts())]


@pytest.mark.parametrize("name", ["_run", "a$b^^$", "$x$", b"caf\xe9".decode(errors="surrogateescape"), "x<b>&"])
def test_any_name_of_a_folder_is_drawn_as_it_is(tmp_path: Path, name: str) -> None:
    for folder in ("base", name):
        make_run(tmp_path / folder, losses(steps=STEPS), settings=config(), val={})
    baseline, *groups = open_groups([str(tmp_path / "base"), str(tmp_path / name)])
    compared = compare(baseline, groups)
    for figure in (loss_figure(compared), gap_figure(compared)):
        assert png(figure).startswith(b"\x89PNG")
        shown = name.replace("\udce9", "\\udce9")
        label = next(text for text in figure.legends[0].get_texts() if f"{shown}: " in text.get_text())
        assert not label.get_parse_math()
    assert html_report(compared, {"Loss": b""}).encode()


def test_loss_shows_both_curves_and_the_switch(comparison: Comparison) -> None:
    figure = loss_figure(comparison)
    measured = comparison.runs[0].train
    assert measured is not None
    label = f"run: {measured.run_loss:.4f} (baseline {measured.baseline_loss:.4f})"
    assert texts(figure) == ["run: forward bf16, backward recipe", "base", label]
    assert vertical_lines(figure) == [240 * TOKENS_PER_STEP]
    lines = {str(line.get_label()): line for line in figure.axes[0].lines}
    assert np.mean(lines[label].get_ydata()[-30:]) > np.mean(lines["base"].get_ydata()[-30:])


def test_gap_shows_line_band_window_dots_and_the_switch(comparison: Comparison) -> None:
    figure = gap_figure(comparison)
    axes = figure.axes[0]
    measured = comparison.runs[0].train
    assert measured is not None
    assert texts(figure)[0] == "run: forward bf16, backward recipe"
    assert texts(figure)[1].startswith(f"run: {measured.gap.value:+.2f}")
    assert vertical_lines(figure) == [240 * TOKENS_PER_STEP]
    line = next(line for line in axes.lines if str(line.get_label()).startswith("run"))
    assert np.asarray(line.get_ydata())[-1] == measured.gap.value
    dots = next(line for line in axes.lines if line.get_marker() == "o")
    assert np.asarray(dots.get_ydata()) == pytest.approx([10.0, 4.0])
    (band,) = axes.collections
    ends = [y for x, y in band.get_paths()[0].vertices if x == STEPS * TOKENS_PER_STEP]
    assert measured.gap.low == pytest.approx(min(ends))
    assert measured.gap.high == pytest.approx(max(ends))
    (window,) = axes.patches
    assert window.get_x() == 270 * TOKENS_PER_STEP
    assert window.get_x() + window.get_width() == STEPS * TOKENS_PER_STEP
    low, high = axes.get_ylim()
    assert low < 0 < high


def test_a_changed_recipe_is_marked(tmp_path: Path) -> None:
    make_run(tmp_path / "base", losses(steps=50), settings=config())
    changed = {20: {"precision/recipe": "fp8_block"}}
    make_run(tmp_path / "run", losses(steps=50, own_seed=1), settings=config(), extra=changed)
    baseline, *groups = open_groups([str(tmp_path / "base"), str(tmp_path / "run")])
    for figure in (loss_figure(compare(baseline, groups)), gap_figure(compare(baseline, groups))):
        assert texts(figure)[0] == "run: recipe fp8_block"
        assert vertical_lines(figure) == [20 * TOKENS_PER_STEP]


def test_colours_differ_and_the_baseline_is_black(tmp_path: Path) -> None:
    names = ["base", *(f"r{number}" for number in range(8))]
    for number, name in enumerate(names):
        make_run(tmp_path / name, losses(steps=50, own_seed=number), settings=config(precision={"name": name}))
    baseline, *groups = open_groups([str(tmp_path / name) for name in names])
    lines = loss_figure(compare(baseline, groups)).axes[0].lines
    styles = {(line.get_color(), line.get_linestyle()) for line in lines if line.get_linestyle() != "None"}
    assert len(styles) == 9
    assert ("#000000", "-") in styles
