"""What was published, and whether the study's numbers agree, by rules on their bands.

    worse       agrees where the whole band of the difference is above 0, disagrees where it is below
    same        agrees where the whole band is within +-.25 points, disagrees where it is outside of that
    figure      agrees where the published figure (or some of a range) is within the band, disagrees where it is not
    below       agrees where the whole band is below the published limit, disagrees where it is above
    anything    open where the band says neither; missing where a row has no runs yet

Published figures belong to other sizes, budgets and baselines: a disagreement with a figure is a difference of
settings until shown otherwise, one with an ordering is worth a look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nvfp4_train.comparison.gap import Gap
from tests.benchmarks.study.cells import BASELINE, FP8, MXFP4, NVFP4
from tests.benchmarks.study.numbers import Table

MARGIN = 0.25  # points of a percent that count as no difference
AGREES, DISAGREES, OPEN, MISSING = "agrees", "disagrees", "open", "missing"

NVIDIA, QUARTET, FOUR_SIX = "arXiv 2509.25149", "released runs of arXiv 2601.22813", "arXiv 2512.02010"


@dataclass(frozen=True)
class Claim:
    """One published statement.

    Attributes:
        said, source: in words, and where.
        rows: what must have run for it.
        measure: the number to judge, with its band.
        judge: verdict on that.
        measured: what the number is, in words.
    """

    said: str
    source: str
    rows: tuple[str, ...]
    measure: Callable[[Table], Gap | None]
    judge: Callable[[Gap], str]
    measured: str


@dataclass(frozen=True)
class Finding:
    """A claim beside the study's number; None where it is missing."""

    claim: Claim
    number: Gap | None
    verdict: str
    missing: tuple[str, ...] = ()


def above(limit: float, number: Gap) -> str:
    """Agrees where the band is above `limit`."""
    if number.low is None or number.high is None:
        return OPEN
    return AGREES if number.low > limit else DISAGREES if number.high < limit else OPEN


def within(margin: float, number: Gap) -> str:
    """Agrees where the band is within +-`margin`, disagrees where it is outside."""
    if number.low is None or number.high is None:
        return OPEN
    if -margin <= number.low and number.high <= margin:
        return AGREES
    return DISAGREES if number.low > margin or number.high < -margin else OPEN


def below(limit: float, number: Gap) -> str:
    """Agrees where the band is below `limit`."""
    return {AGREES: DISAGREES, DISAGREES: AGREES}.get(above(limit, number), OPEN)


def equals(figure: float, number: Gap) -> str:
    """Agrees where the band holds `figure`."""
    return overlaps(figure, figure, number)


def overlaps(smallest: float, largest: float, number: Gap) -> str:
    """Agrees where the band holds some of the range from `smallest` to `largest`."""
    if number.low is None or number.high is None:
        return OPEN
    return AGREES if number.low <= largest and smallest <= number.high else DISAGREES


def worse(worse_row: str, better_row: str, said: str, source: str) -> Claim:
    """`worse_row` has the larger loss."""
    return Claim(
        said,
        source,
        (worse_row, better_row),
        lambda table: table.gap(worse_row, better_row),
        partial(above, 0.0),
        f"gap of `{worse_row}` to `{better_row}`, %",
    )


def same(row: str, other: str, said: str, source: str) -> Claim:
    """Both have the same loss."""
    return Claim(
        said,
        source,
        (row, other),
        lambda table: table.gap(row, other),
        partial(within, MARGIN),
        f"gap of `{row}` to `{other}`, %",
    )


def figure(row: str, baseline: str, value: float, said: str, source: str) -> Claim:
    """The gap of a row is `value` percent."""
    return Claim(
        said,
        source,
        (row, baseline),
        lambda table: table.gap(row, baseline),
        partial(equals, value),
        f"gap of `{row}` to `{baseline}`, %",
    )


def quartet(row: str, value: float, said: str) -> Claim:
    """A gap to BF16 of the released runs of Quartet II."""
    return figure(row, BASELINE, value, said, QUARTET)


def variant(name: str) -> str:
    """A variant's row."""
    return f"{NVFP4}, {name}"


CLAIMS = (
    worse(NVFP4, BASELINE, "NVFP4 has a larger loss than BF16", NVIDIA),
    worse(NVFP4, FP8, "NVFP4 has a larger loss than FP8", NVIDIA),
    worse(MXFP4, NVFP4, "MXFP4 has a larger loss than NVFP4", NVIDIA),
    worse(variant("nearest gradients"), NVFP4, "stochastic rounding of gradients helps", NVIDIA),
    worse(variant("no rotation"), NVFP4, "the rotation in wgrad helps", NVIDIA),
    worse(variant("1x16 weights"), NVFP4, "square weight tiles help", NVIDIA),
    worse(variant("no BF16 blocks"), NVFP4, "blocks in BF16 help", NVIDIA),
    worse(variant("BF16 blocks first"), NVFP4, "the last blocks need BF16 more than the first", NVIDIA),
    worse(NVFP4, variant("late forward"), "a late switch of the forward pass to BF16 helps", NVIDIA),
    same(variant("late backward"), NVFP4, "a late switch of the backward pass alone does nothing", NVIDIA),
    same(variant("late both"), FP8, "with a late switch of both passes the loss is that of FP8", NVIDIA),
    Claim(
        "the gap to FP8 grows as the learning rate decays (< 1% before, a little over 1.5% at the end)",
        NVIDIA,
        (NVFP4, FP8),
        lambda table: table.growth(NVFP4, FP8),
        partial(above, 0.0),
        f"gap of `{NVFP4}` to `{FP8}` at the end less that before the decay, points",
    ),
    worse(NVFP4, "nvfp4_four_over_six", "four over six helps", FOUR_SIX),
    worse(NVFP4, "quartet2", "Quartet II has a smaller loss", QUARTET),
    worse(
        "nvfp4_fwd_bf16_bwd", "bf16_fwd_nvfp4_bwd", "a quantized forward pass costs more than a backward pass", QUARTET
    ),
    figure(NVFP4, FP8, 1.5, "12B hybrid, 10T tokens: a little over 1.5% to FP8", NVIDIA),
    figure(NVFP4, BASELINE, 1.5, "8B hybrid, 1T tokens: about 1.5% to BF16", NVIDIA),
    figure(MXFP4, BASELINE, 2.5, "8B hybrid, 1T tokens: MXFP4 about 2.5% to BF16", NVIDIA),
    Claim(
        "8B hybrid, 1T tokens: MXFP4 needs 36% more tokens for NVFP4's loss",
        NVIDIA,
        (MXFP4, NVFP4),
        lambda table: table.match(MXFP4, NVFP4),
        partial(equals, 1.36),
        f"tokens of `{MXFP4}` over those of `{NVFP4}` for the same loss",
    ),
    figure(variant("late forward"), FP8, 0.5, "12B hybrid: .5% to FP8 after a late switch of the forward pass", NVIDIA),
    Claim(
        "12B hybrid, 10T tokens: < 1% to FP8 while the learning rate is held",
        NVIDIA,
        (NVFP4, FP8),
        lambda table: table.hold_gap(NVFP4, FP8),
        partial(below, 1.0),
        f"gap of `{NVFP4}` to `{FP8}` before the decay, %",
    ),
    quartet(variant("no BF16 blocks"), 1.60, "30M dense, 25 tokens a parameter, no BF16 blocks: 1.60%"),
    quartet("nvfp4_four_over_six", 1.71, "100M dense, 25 tokens a parameter, four over six, no BF16 blocks: 1.71%"),
    quartet("quartet2", 1.84, "30M dense, 100 tokens a parameter, Quartet II, no BF16 blocks: 1.84%"),
    quartet("nvfp4_fwd_bf16_bwd", 2.16, "30M dense, 100 tokens a parameter, forward alone, 16x16 weights: 2.16%"),
    quartet("bf16_fwd_nvfp4_bwd", 0.34, "30M dense, 100 tokens a parameter, backward alone: .34%"),
    Claim(
        "the final loss varies by .001 to .002 nats between seeds (125M)",
        "runs of 125M, unnamed",
        (BASELINE,),
        lambda table: table.seed_deviation(BASELINE),
        partial(overlaps, 0.001, 0.002),
        f"standard deviation of the validation loss of `{BASELINE}`, nats",
    ),
    Claim(
        "7% of the weight gradients are zero at the end",
        "arXiv 2604.12374",
        ("nemotron3_super",),
        lambda table: table.zeros("nemotron3_super"),
        partial(equals, 7.0),
        "zero weight gradients of the quantized linears of `nemotron3_super`, %",
    ),
)  # fmt: skip


def findings(table: Table) -> list[Finding]:
    """Every claim with its verdict."""
    return [_finding(claim, table) for claim in CLAIMS]


def _finding(claim: Claim, table: Table) -> Finding:
    missing = tuple(row for row in claim.rows if row not in table.rows)
    number = None if missing else claim.measure(table)
    if number is None:
        return Finding(claim, None, MISSING, missing)
    return Finding(claim, number, claim.judge(number))
