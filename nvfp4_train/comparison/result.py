"""One baseline and several runs compared: what `compare.json` holds, and what the pictures are drawn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nvfp4_train.comparison.gap import (
    CONFIDENCE,
    WINDOW,
    Aligned,
    Gap,
    align,
    before_window,
    seeds_gap,
    window_gap,
    window_start,
)
from nvfp4_train.comparison.match import Match, tokens_to_match
from nvfp4_train.comparison.pairing import pair_up, unpaired_reasons
from nvfp4_train.comparison.runs import CompareError, Curve, Group, Run


@dataclass(frozen=True)
class Measured:
    """One loss of two runs over the last 10%: the gap in percent and the mean losses it stands between, in nats."""

    gap: Gap
    baseline_loss: float
    run_loss: float


@dataclass(frozen=True)
class RunResult:
    """One run, or several seeds of one, against the baseline.

    Attributes:
        name: of the run folder, or of the group of seeds.
        pairs: (baseline, run) of each seed.
        reasons: why the runs are not paired; empty when they are.
        train: None where the run diverged.
        val: None where the two runs have no validation loss at equal tokens.
        match: the factor of tokens to match.
        notes: what a reader should know.
    """

    name: str
    pairs: tuple[tuple[Run, Run], ...]
    reasons: tuple[str, ...]
    train: Measured | None
    val: Measured | None
    match: Match
    notes: tuple[str, ...]

    @property
    def paired(self) -> bool:
        """True when every pair has the same batches, seed and model."""
        return not self.reasons

    @property
    def band(self) -> str:
        """Where the band comes from: `seeds`, or the noise of the `difference` of two runs."""
        return "seeds" if len(self.pairs) > 1 else "difference"

    def exceeds(self, limit: float) -> bool:
        """Whether the training or the validation gap is above `limit` percent; a run that diverged is above any."""
        return self.train is None or any(measured.gap.value > limit for measured in (self.train, self.val) if measured)


@dataclass(frozen=True)
class Comparison:
    """All runs against one baseline."""

    baseline: Group
    runs: tuple[RunResult, ...]

    def to_json(self) -> dict[str, Any]:
        """The content of `compare.json`: JSON values alone, no NaN."""
        return {
            "baseline": self.baseline.name,
            "runs": [_run_json(run) for run in self.runs],
            "window": WINDOW,
            "confidence": CONFIDENCE,
        }


def _run_json(run: RunResult) -> dict[str, Any]:
    return {
        "name": run.name,
        "paired": run.paired,
        "reasons": list(run.reasons),
        "gap": {"train": _gap_json(run.train), "val": _gap_json(run.val)},
        "tokens_to_match": run.match.factor,
        "tokens_to_match_reason": run.match.reason or None,
        "seeds": [pair[1].seed for pair in run.pairs],
        "band": run.band,
        "loss": {
            side: {"baseline": measured.baseline_loss, "run": measured.run_loss} if measured else None
            for side, measured in (("train", run.train), ("val", run.val))
        },
        "notes": list(run.notes),
    }


def _gap_json(measured: Measured | None) -> dict[str, float | None] | None:
    return {"value": measured.gap.value, "low": measured.gap.low, "high": measured.gap.high} if measured else None


def compare(baseline: Group, groups: Sequence[Group], *, unpaired: bool = False) -> Comparison:
    """Compare each of `groups` with `baseline`.

    Raises CompareError where a pair is not paired and `unpaired` is not asked for, has no tokens in common, or the
    baseline diverged.
    """
    runs = [_compare_group(baseline, group) for group in groups]
    refused = [
        f"{run.name} is not paired with {baseline.name}: {'; '.join(run.reasons)}." for run in runs if run.reasons
    ]
    if refused and not unpaired:
        raise CompareError(
            "\n".join(refused) + "\nA difference of unpaired runs holds the noise of their batches and seeds too. "
            "Train both with the same data, seed and model, or add --unpaired to compare them all the same."
        )
    return Comparison(baseline, tuple(runs))


def _compare_group(baseline: Group, group: Group) -> RunResult:
    pairs, notes = pair_up(baseline, group)
    reasons: list[str] = []
    for first, second in pairs:
        if first.path.resolve() == second.path.resolve():
            notes.append(f"{second.name}: baseline and run are the same folder, and a run has no gap to itself")
        prefix = f"seed {second.seed}: " if len(pairs) > 1 else ""
        reasons += [prefix + reason for reason in unpaired_reasons(first, second)]
        notes += [f"{run.name}: {note}" for run in (first, second) for note in run.notes]
    train = [_measure_train(first, second, notes) for first, second in pairs]
    val = [_measure_val(first, second, notes) for first, second in pairs]
    diverged = Match(None, "not reached: the run diverged")
    matches = [
        tokens_to_match(pair[0].train, pair[1].train) if known else diverged
        for pair, known in zip(pairs, train, strict=True)
    ]
    return RunResult(
        group.name,
        tuple(pairs),
        tuple(reasons),
        _mean(train),
        _mean(val),
        _mean_match(matches),
        tuple(dict.fromkeys(notes)),
    )


def _measure_train(baseline: Run, run: Run, notes: list[str]) -> Measured | None:
    """None, and a note, where the run diverged."""
    aligned = align(baseline.train, run.train)
    if _diverged(baseline.train):
        raise CompareError(
            f"{baseline.path}: the baseline diverged, its training loss ends in values that are not finite. "
            "Take another one."
        )
    if _diverged(run.train):
        notes.append(f"{run.name}: diverged, its training loss ends in values that are not finite; no gap is given")
        return None
    if not len(aligned):
        raise CompareError(
            f"{baseline.path} has losses from {_span(baseline.train)} tokens and {run.path} from {_span(run.train)}: "
            "there is nothing at equal tokens to compare. Give runs that overlap."
        )
    if not aligned.baseline[window_start(aligned.tokens) :].mean():
        raise CompareError(
            f"{baseline.path}: its training loss is 0 over the last 10%, and a gap is relative to it. Take another one."
        )
    measured = _measure(aligned)
    if measured.gap.half_width is None:
        notes.append(
            f"{run.name}: {len(aligned)} common steps are too few to tell the noise, so the training gap has no band"
        )
    return measured


def _diverged(curve: Curve) -> bool:
    """Whether the last loss, or more than half of the last 10%, is not a finite number."""
    finite = np.isfinite(curve.losses)
    return not finite[-1] or bool(np.mean(finite[window_start(curve.tokens) :]) < 0.5)


def _span(curve: Curve) -> str:
    return f"{curve.tokens[0]} to {curve.tokens[-1]}"


def _measure_val(baseline: Run, run: Run, notes: list[str]) -> Measured | None:
    aligned = align(baseline.val, run.val)
    if not len(aligned):
        if len(baseline.val) or len(run.val):
            notes.append(f"{run.name}: no validation loss at equal tokens in both runs, so there is no validation gap")
        return None
    end = min(baseline.train.tokens[-1], run.train.tokens[-1])
    if aligned.tokens[-1] <= before_window(int(end)):
        notes.append(
            f"{run.name}: the last validation in both runs was at {aligned.tokens[-1]} of {end} tokens; "
            "the gap is from there"
        )
    measured = _measure(aligned)
    if measured.gap.half_width is None:
        count = "one common validation is" if len(aligned) == 1 else f"{len(aligned)} common validations are"
        notes.append(f"{run.name}: {count} too few to tell the noise; no band is given")
    return measured


def _measure(aligned: Aligned) -> Measured:
    start = window_start(aligned.tokens)
    return Measured(window_gap(aligned), float(aligned.baseline[start:].mean()), float(aligned.run[start:].mean()))


def _mean(measured: Sequence[Measured | None]) -> Measured | None:
    """Over seeds; None where one of them has none."""
    known = [one for one in measured if one is not None]
    if len(known) < len(measured):
        return None
    gap = seeds_gap([one.gap for one in known])
    return Measured(
        gap, float(np.mean([one.baseline_loss for one in known])), float(np.mean([one.run_loss for one in known]))
    )


def _mean_match(matches: Sequence[Match]) -> Match:
    """Geometric mean over seeds: factors multiply. Not reached where one of them was not."""
    missing = next((match for match in matches if match.factor is None), None)
    if missing is not None:
        return missing
    return Match(math.exp(float(np.mean([math.log(match.factor) for match in matches if match.factor is not None]))))
