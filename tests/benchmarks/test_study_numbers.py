"""What the study says of curves with known gaps: bands, verdicts, the page, half-filled tables, diverged runs."""

from __future__ import annotations

import csv
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nvfp4_train.comparison.gap import Gap, t_quantile
from nvfp4_train.comparison.runs import CompareError, Curve, Run
from tests.benchmarks.study import page, times
from tests.benchmarks.study.cells import LONG, rows
from tests.benchmarks.study.claims import (
    AGREES,
    DISAGREES,
    MISSING,
    OPEN,
    above,
    below,
    equals,
    findings,
    overlaps,
    within,
)
from tests.benchmarks.study.numbers import Table, pooled, read_table
from tests.benchmarks.study.store import Record, Store, newest_setup

STEPS, TOKENS = 200, 1000
GAPS = {  # percent by seed
    "bf16": (0.0, 0.0, 0.0),
    "fp8_block": (0.2, 0.3, 0.4),
    "nvfp4": (1.4, 1.5, 1.6),
    "mxfp4": (2.5, 2.6, 2.7),
    "nvfp4, late backward": (1.45, 1.55),
    "nvfp4, late forward": (0.4, 0.6),
    "4/6 late": (0.6, 0.7),
}
LINE = Record(
    table="main", row="", seed=1, setup="s1", corpus="text", steps=STEPS, tokens=STEPS * TOKENS, train_loss=0.0,
    val_loss=0.0, linear_percent=80.0, above_four=12.0, above_four_output=36.0, zeros=0.01, zeros_worst=0.1,
    flushed="fprop_input=0.10000 wgrad_input=0.05000", flushed_worst="0.20000 decoder.layers.0.x/fprop_input",
    step_ms=80.0, seconds=16.0, jobs=2, device="cpu", torch="2.11",
)  # fmt: skip


def curve(gap: float, hold_gap: float | None = None) -> Curve:
    """`gap` percent above a falling loss; up to 80% of the run `hold_gap`, where it is given."""
    steps = np.arange(1, STEPS + 1)
    share = np.full(STEPS, gap)
    if hold_gap is not None:
        share[: int(0.8 * STEPS)] = hold_gap
    return Curve(steps, TOKENS * steps, (2 + 3 * steps**-0.5) * (1 + share / 100))


def add(store: Store, row: str, seed: int, gap: float, hold_gap: float | None = None, **changes: object) -> Run:
    train = curve(gap, hold_gap)
    val = Curve(train.steps[-1:], train.tokens[-1:], train.losses[-1:])
    hashes = {int(step): f"{seed}-{step}" for step in train.steps}
    run = Run("", Path(), train, val, hashes)
    line = replace(LINE, row=row, seed=seed, train_loss=float(train.losses[-1]), val_loss=float(val.losses[-1]))
    store.add(replace(line, **changes), run)
    return run


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of GAPS, for all tests of this file."""
    store = Store(tmp_path_factory.mktemp("study"))
    for row, gaps in GAPS.items():
        for seed, gap in enumerate(gaps, 1):
            hold = 0.5 * gap if row == "nvfp4" else None
            add(store, row, seed, gap, hold, **({"above_four": 9.3} if row == "4/6 late" else {}))
    (store.folder / times.FILE).write_text(times.to_csv({"bf16": (32.0, 1.0), "nvfp4": (48.0, 1.5)}))
    return store.folder


@pytest.fixture
def store(kept: Path, tmp_path: Path) -> Store:
    """A copy that a test may add to."""
    return Store(Path(shutil.copytree(kept, tmp_path / "study")))


@pytest.fixture
def table(store: Store) -> Table:
    found = read_table(store, "main")
    assert found is not None
    return found


def test_a_run_comes_back_as_it_was_kept(store: Store) -> None:
    run = add(store, "quartet2", 1, 1.25)
    line = store.records()[-1]
    assert (line.row, line.seed, line.flushed_shares()) == ("quartet2", 1, {"fprop_input": 0.1, "wgrad_input": 0.05})
    back = store.run(line)
    assert np.array_equal(back.train.tokens, run.train.tokens)
    assert back.train.losses == pytest.approx(run.train.losses, rel=1e-7)
    assert (back.val.tokens.tolist(), back.seed, back.precision) == (
        [STEPS * TOKENS], 1, {"coverage": {"linear_percent": 80.0}})  # fmt: skip
    count = len(store.records())
    add(store, "quartet2", 1, 1.5)
    assert len(store.records()) == count  # over the earlier one
    assert store.run(store.records()[-1]).train.losses[-1] > back.train.losses[-1]


def test_curves_with_a_missing_step_are_no_curves(store: Store) -> None:
    run = add(store, "bf16", 1, 0.0)
    holes = Curve(run.train.steps[1:], run.train.tokens[1:], run.train.losses[1:])
    with pytest.raises(AssertionError, match="a step is missing"):
        store.add(replace(LINE, row="bf16"), replace(run, train=holes))


def test_gaps_have_the_spread_of_all_rows_in_their_band(table: Table) -> None:
    assert table.gaps("nvfp4") == pytest.approx([1.4, 1.5, 1.6], abs=1e-4)
    # three rows of three seeds .1 apart, and squares of two seeds: .05^2 * 2, .1^2 * 2, .05^2 * 2
    deviation = math.sqrt((3 * 0.02 + 0.005 + 0.02 + 0.005) / 9)
    assert table.spread.freedom == 9
    assert table.spread.deviation == pytest.approx(deviation, rel=1e-3)
    gap = table.gap("4/6 late")
    assert gap is not None
    assert gap.value == pytest.approx(0.65, abs=1e-4)
    assert gap.half_width == pytest.approx(t_quantile(9) * deviation / math.sqrt(2), rel=1e-3)
    fp8 = table.gap("nvfp4", "fp8_block")
    assert fp8 is not None
    assert fp8.value == pytest.approx(100 * (1.015 / 1.003 - 1), abs=1e-3)


def test_pooled_spread() -> None:
    assert pooled([[1.0], [2.0]]).band([1.0, 3.0]) == Gap(2.0)
    assert pooled([[1.0, 3.0], [0.0, 4.0]]).deviation == pytest.approx(math.sqrt((2 + 8) / 2))


def test_verdicts_follow_from_bands() -> None:
    assert [above(0, Gap(1, *band)) for band in ((0.1, 2), (-0.1, 2), (-2, -0.1))] == [AGREES, OPEN, DISAGREES]
    bands = ((-0.2, 0.2), (-0.3, 0.2), (0.26, 0.4), (-1, -0.3))
    assert [within(0.25, Gap(0, *band)) for band in bands] == [AGREES, OPEN, DISAGREES, DISAGREES]
    assert [equals(1.5, Gap(1, *band)) for band in ((1, 1.6), (1.6, 2), (0, 1))] == [AGREES, DISAGREES, DISAGREES]
    assert [below(1, Gap(1, *band)) for band in ((0.1, 0.9), (0.9, 1.1), (1.1, 2))] == [AGREES, OPEN, DISAGREES]
    assert [overlaps(1, 2, Gap(1, *band)) for band in ((0, 1), (1.2, 1.5), (2.1, 3))] == [AGREES, AGREES, DISAGREES]
    assert {above(0, Gap(1)), below(1, Gap(0)), within(1, Gap(0)), equals(1, Gap(1))} == {OPEN}


def test_claims_are_judged_and_missing_ones_named(table: Table) -> None:
    by_words = {finding.claim.said: finding for finding in findings(table)}
    verdicts = {said: finding.verdict for said, finding in by_words.items()}
    assert verdicts["MXFP4 has a larger loss than NVFP4"] == AGREES
    assert verdicts["a late switch of the backward pass alone does nothing"] == AGREES
    assert verdicts["a late switch of the forward pass to BF16 helps"] == AGREES
    assert verdicts["8B hybrid, 1T tokens: about 1.5% to BF16"] == AGREES
    assert verdicts["8B hybrid, 1T tokens: MXFP4 about 2.5% to BF16"] == AGREES
    assert verdicts["12B hybrid, 10T tokens: a little over 1.5% to FP8"] == DISAGREES
    quartet = by_words["Quartet II has a smaller loss"]
    assert (quartet.verdict, quartet.missing) == (MISSING, ("quartet2",))
    held = next(finding for said, finding in by_words.items() if "is held" in said)
    assert held.number is not None
    assert held.number.value == pytest.approx(100 * (1.0075 / 1.003 - 1), abs=1e-3)
    assert held.verdict == AGREES
    grows = next(finding for said, finding in by_words.items() if said.startswith("the gap to FP8 grows"))
    assert grows.verdict == AGREES
    assert grows.number is not None
    # at the end 1.5 against .3 percent above the same curve, before .75 against .3
    assert grows.number.value == pytest.approx(100 * ((1.015 - 1.0075) / 1.003), abs=1e-3)


def test_spread_of_validation_losses_and_zeros(table: Table) -> None:
    losses = [line.val_loss for line in table.records["nvfp4"].values()]
    deviation = float(np.std(losses, ddof=1))
    found = table.seed_deviation("nvfp4")
    assert found is not None
    # chi-squared of two degrees of freedom: .0506 and 7.378
    ends = deviation * math.sqrt(2 / 7.3778), deviation * math.sqrt(2 / 0.050636)
    assert (found.value, found.low, found.high) == pytest.approx((deviation, *ends), rel=1e-4)
    two = table.seed_deviation("4/6 late")
    assert two is not None
    assert two.low is None
    assert table.zeros("nvfp4") == Gap(1.0, 1.0, 1.0)
    assert table.zeros("quartet2") is None


def test_a_diverged_row_is_infinitely_worse(store: Store) -> None:
    run = add(store, "nvfp4, no rotation", 1, 1.0)
    run.train.losses[-1] = np.nan
    store.add(replace(LINE, row="nvfp4, no rotation", train_loss=math.nan, val_loss=math.nan), run)
    table = read_table(store, "main")
    assert table is not None
    gap = table.gap("nvfp4, no rotation", "nvfp4")
    assert gap is not None
    assert (gap.value, page.shown(gap), above(0, gap)) == (math.inf, "diverged", AGREES)
    line = next(line for line in page.lines(table) if line.row == "nvfp4, no rotation")
    assert "| `nvfp4, no rotation` | - | - | diverged | diverged | 1 |" in page.table_text([line])
    assert page.picture_rows([line])[0].gap is None


def test_tokens_to_match_of_curves_that_are_stretched(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in (1, 2):
        for row, stretch in (("nvfp4", 1.0), ("mxfp4", 1.36)):
            steps = np.arange(1, STEPS + 1)
            train = Curve(steps, TOKENS * steps, 2 + 3 * (steps / stretch) ** -0.5)
            store.add(replace(LINE, row=row, seed=seed), Run("", Path(), train, train, dict.fromkeys(steps, "x")))
    table = read_table(store, "main")
    assert table is not None
    match = table.match("mxfp4", "nvfp4")
    assert match is not None
    assert match.value == pytest.approx(1.36, rel=0.01)


def test_runs_of_other_batches_are_not_compared(store: Store) -> None:
    run = add(store, "quartet2", 1, 1.0)
    store.add(replace(LINE, row="quartet2"), replace(run, hashes=dict.fromkeys(run.hashes, "other")))
    table = read_table(store, "main")
    assert table is not None
    with pytest.raises(CompareError, match="quartet2, seed 1 is not paired with bf16, seed 1: the batches"):
        table.gap("quartet2")


def test_of_several_setups_the_one_with_most_runs_is_shown(store: Store) -> None:
    add(store, "bf16", 1, 0.0, setup="s2")
    assert newest_setup(store.records(), "main") == "s1"
    assert newest_setup(store.records(), "long") is None
    table = read_table(store, "main")
    assert table is not None
    assert {line.setup for seeds in table.records.values() for line in seeds.values()} == {"s1"}


def test_the_page_of_a_table_that_is_not_full(store: Store, tmp_path: Path) -> None:
    names = page.write(store, tmp_path / "out", {}, "Text of tests.")
    assert names == ["study.md", "study.csv", "study-main.png", "study-main-curves.png"]
    text = (tmp_path / "out" / "study.md").read_text()
    assert "Text of tests." in text
    assert "18 of 52 runs are there. Missing: `fp8_current` seed 1, 2;" in text
    assert "0 of 12 runs are there." in text
    assert "| `nvfp4` | 2.2431 | 2.2431 | +1.50 ± 0.13 | +1.196 ± 0.068 | 3 | 1.50 | 12.0% | 1.00% |" in text
    assert "| missing: `quartet2` |" in text
    assert "forward in BF16 from 72% on | 0.43 | reached | 9.3% (36.0%) | kept |" in text
    assert (
        "| `nvfp4` | 10.00% | - | - | - | - | 5.00% | 20.0% `decoder.layers.0.x/fprop_input` | 1.00% | 10.00% |" in text
    )
    assert "Here, in `nvfp4`: disagrees." in text
    found = list(csv.DictReader((tmp_path / "out" / "study.csv").read_text().splitlines()))
    assert [line["row"] for line in found][:2] == ["bf16", "fp8_block"]
    assert found[1]["gap"] == "0.3000"
    order = [line["row"] for line in found]
    assert order.index("nvfp4, late forward") < order.index("nvfp4") < order.index("mxfp4")


def test_a_page_of_nothing_says_so(tmp_path: Path) -> None:
    assert page.write(Store(tmp_path / "none"), tmp_path, {}) == ["study.md", "study.csv"]
    text = (tmp_path / "study.md").read_text()
    assert "The learning rate has not been tuned here yet." in text
    assert "0 of 52 runs are there." in text
    assert page.section(None, LONG, rows(), {}).startswith("## 25 tokens a parameter")
