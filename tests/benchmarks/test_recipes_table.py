"""The table of recipes: numbers from runs with known gaps, and pages filled in the right place."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from nvfp4_train.comparison.gap import Gap
from nvfp4_train.comparison.runs import Curve, Group, Run
from tests.benchmarks.recipes_table import (
    PLACE,
    Row,
    fill_page,
    gap_picture,
    make_rows,
    to_csv,
    whole_page,
    worse_or_not,
)

PAGES = Path(__file__).parents[2] / "configs" / "precision"
STEPS = 100


def group(recipe: str, factors: list[float]) -> Group:
    """One run a factor, its losses the baseline's times the factor; seeds 1, 2, ..."""
    runs = []
    for seed, factor in enumerate(factors, 1):
        steps = np.arange(1, STEPS + 1)
        train = Curve(steps, 4096 * steps, np.full(STEPS, 2.0 + seed) * factor)
        val = Curve(steps[-1:], 4096 * steps[-1:], np.array([3.0]) * factor)
        config = {"seed": seed, "model": {"hidden_size": 128}}
        precision = {"coverage": {"linear_percent": 80.0 if factor > 1 else 0.0}}
        hashes = {int(step): f"{seed}-{step}" for step in steps}
        name = f"{recipe}-seed{seed}"
        runs.append(Run(name, Path(name), train, val, hashes, config=config, precision=precision))
    return Group(recipe, tuple(runs))


@pytest.fixture
def groups() -> dict[str, Group]:
    """nvfp4 is 1% above bf16 on the mean of its seeds, mxfp4 2%, fp8_block .5% in its one seed."""
    return {
        "mxfp4": group("mxfp4", [1.019, 1.02, 1.021]),
        "bf16": group("bf16", [1.0, 1.0, 1.0]),
        "nvfp4": group("nvfp4", [1.009, 1.01, 1.011]),
        "fp8_block": group("fp8_block", [1.005]),
    }


@pytest.fixture
def rows(groups: dict[str, Group]) -> list[Row]:
    return make_rows(groups, {"bf16": 1.0, "mxfp4": 1.5, "nvfp4": 1.4, "fp8_block": 1.2})


def test_rows_hold_the_known_gaps_and_losses_in_order(rows: list[Row]) -> None:
    assert [row.recipe for row in rows] == ["bf16", "fp8_block", "nvfp4", "mxfp4"]
    bf16, fp8, nvfp4, _ = rows
    assert (bf16.gap, bf16.seeds, bf16.train_loss, bf16.linear_percent) == (None, (1, 2, 3), pytest.approx(3.0), 0.0)
    assert fp8.gap is not None
    assert fp8.gap.value == pytest.approx(0.5)
    assert (fp8.train_loss, fp8.val_loss) == (pytest.approx(3.015), pytest.approx(3.015))
    assert nvfp4.gap is not None
    assert nvfp4.gap.value == pytest.approx(1.0)
    assert nvfp4.seed_gaps == pytest.approx((0.9, 1.0, 1.1))
    # Student's t at 2 degrees of freedom, 4.303, times the spread .1 over the root of 3
    assert nvfp4.gap.half_width == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    assert (nvfp4.step_ratio, nvfp4.linear_percent) == (1.4, 80.0)


def test_the_sentence_says_which_is_worse_and_whether_that_is_sure(groups: dict[str, Group]) -> None:
    sure = worse_or_not(groups["nvfp4"], groups["mxfp4"])
    assert sure.startswith("On the mean of seeds 1, 2, 3, the gap of `mxfp4` to `nvfp4` in training loss is +0.990")
    assert sure.endswith("`mxfp4` is worse.")
    unsure = worse_or_not(groups["nvfp4"], group("mxfp4", [1.009, 1.01, 1.05]))
    assert unsure.endswith("`mxfp4` is worse, but the band holds zero.")
    better = worse_or_not(groups["mxfp4"], groups["nvfp4"])
    assert better.endswith("`nvfp4` is NOT worse, by 0.980 %.")


def test_csv_has_a_line_a_recipe(rows: list[Row]) -> None:
    lines = list(csv.DictReader(to_csv(rows).splitlines()))
    assert [line["recipe"] for line in lines] == [row.recipe for row in rows]
    assert lines[0] | {"gap": "0.0000", "gap_low": "", "seed_gaps": ""} == lines[0]
    assert lines[2] | {"seeds": "1 2 3", "gap": "1.0000", "seed_gaps": "0.9000 1.0000 1.1000"} == lines[2]
    assert (lines[2]["step_time_ratio"], lines[2]["linear_flops_percent"]) == ("1.400", "80.00")


def test_page_of_all_recipes(rows: list[Row]) -> None:
    page = whole_page(rows, ["measured somewhere"])
    assert "\n\nmeasured somewhere\n\n| recipe |" in page
    assert "| `nvfp4` | 3.0270 | 3.0270 | +1.00 ± 0.25 | 3 | 1.40 | 80.0% |\n" in page
    assert "| `bf16` | 3.0000 | 3.0000 | 0 | 3 | 1.00 | 0.0% |\n" in page


def test_a_page_is_filled_between_its_marks_and_the_same_when_filled_again(rows: list[Row]) -> None:
    page = "before\n<!-- measured-here: nvfp4 fp8_block -->\nold\n<!-- /measured-here -->\nafter\n"
    by_name = {row.recipe: row for row in rows}
    filled = fill_page(page, by_name, "caption")
    assert filled == (
        "before\n<!-- measured-here: nvfp4 fp8_block -->\n"
        "| recipe | final loss | gap to `bf16` | step time over `bf16` |\n|---|---|---|---|\n"
        "| `nvfp4` | 3.0270 | +1.00 ± 0.25 % (3 seeds) | 1.40 |\n"
        "| `fp8_block` | 3.0150 | +0.500 ± 0.000 % | 1.20 |\n"
        "\ncaption\n<!-- /measured-here -->\nafter\n"
    )
    assert fill_page(filled, by_name, "caption") == filled


def test_a_page_that_cannot_be_filled_says_why(rows: list[Row]) -> None:
    by_name = {row.recipe: row for row in rows}
    with pytest.raises(ValueError, match="other is none of the measured bf16, fp8_block"):
        fill_page("<!-- measured-here: nvfp4 other -->\n<!-- /measured-here -->\n", by_name, "")
    with pytest.raises(ValueError, match="no table between"):
        fill_page("# no marks\n", by_name, "")


def test_every_recipe_has_its_place_in_one_page() -> None:
    named = [
        name for path in PAGES.glob("*.md") for place in PLACE.finditer(path.read_text()) for name in place[2].split()
    ]
    assert sorted(named) == sorted(path.stem for path in PAGES.glob("*.yaml"))


def test_picture_shows_each_gap_once_in_order(rows: list[Row]) -> None:
    (axes,) = gap_picture(rows, "title").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fp8_block", "nvfp4", "mxfp4"]
    assert [text.get_text() for text in axes.texts] == [str(row.gap) for row in rows[1:]]
    assert axes.get_ylim() == (2.5, -0.5)  # the smallest gap on top


def test_a_diverged_run_is_named(groups: dict[str, Group]) -> None:
    run = groups["fp8_block"].runs[0]
    run.train.losses[-1] = np.nan
    rows = make_rows(groups, dict.fromkeys(groups, 1.0))
    assert (rows[-1].recipe, rows[-1].gap, rows[-1].gap_text) == ("fp8_block", None, "diverged")
    assert Gap(1.0) != rows[-1].gap
    assert "| `fp8_block` |" in whole_page(rows, [])
    assert len(gap_picture(rows, "").axes[0].get_yticklabels()) == 2
