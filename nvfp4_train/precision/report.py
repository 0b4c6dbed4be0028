"""The precision report: what every linear runs in, who decided it, and how much of the work that is. No torch here.

`report` is the whole of it, for `precision.json`; `summary` is what fits on a screen at start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from nvfp4_train.precision.assignment import LinearPrecision, rule_name
from nvfp4_train.precision.config import PrecisionConfig
from nvfp4_train.precision.fit import MISFIT
from nvfp4_train.precision.phases import Passes, PassSchedule
from nvfp4_train.precision.validation import KNOBS, written

KNOB_WORDS = {
    "rotation": "rotation",
    "gradient_rounding": "stochastic rounding of gradients",
    "weight_tile": "weight tile",
    "four_over_six": "four over six",
}
# What a published value must become for its thing to be gone, rather than changed.
OFF_VALUES: dict[str, Any] = {"rotation": None, "gradient_rounding": "nearest", "four_over_six": None}


def report(
    config: PrecisionConfig,
    assignments: Sequence[LinearPrecision],
    training_flops: float,
    schedule: PassSchedule | None = None,
    backend: str | None = None,
) -> dict[str, Any]:
    """The precision report of a run, ready for JSON.

    Args:
        config: the recipe with the user's overrides.
        assignments: of every linear of the model, from `assign`.
        training_flops: of one token, forward and backward, everything counted (attention, scan, output layer).
        schedule: the resolved phases, where the run's steps are known.
        backend: what was chosen on this machine; by default what the configuration asks for.
    """
    return {
        "recipe": config.name,
        "description": config.description,
        "source": config.source,
        "backend": backend or config.backend,
        "coverage": coverage(assignments, training_flops),
        "departures": departures(config),
        "phases": [] if schedule is None else [_stage(*stage) for stage in schedule.stages],
        "rules": _rules("rules", config, assignments),
        "recipe_rules": _rules("recipe_rules", config, assignments),
        "linears": [_linear(assignment) for assignment in assignments],
    }


def coverage(assignments: Iterable[LinearPrecision], training_flops: float) -> dict[str, Any]:
    """How much of a training step's work runs in low precision.

    Each of a linear's three GEMMs counts 2 * in-features * out-features operations a token. A GEMM is in low precision
    where both of its operands are.

    Returns:
        percentages: `linear_percent` of all linear GEMMs (output layer included), `total_percent` of all operations,
        and `by_format`, the part of each GEMM format in the linear GEMMs, BF16 included.
    """
    work: Counter[str] = Counter()
    low = 0
    for assignment in assignments:
        operations = 2 * assignment.in_features * assignment.out_features
        for gemm, pair in assignment.operands.items():
            work[assignment.gemm_formats[gemm]] += operations
            low += operations * all(operand.format != "bf16" for operand in pair.values())
    total = work.total()
    assert 0 < total <= training_flops, f"linear GEMMs have {total} operations a token, the whole step {training_flops}"
    return {
        "linear_percent": 100 * low / total,
        "total_percent": 100 * low / training_flops,
        "by_format": {name: 100 * operations / total for name, operations in work.most_common()},
    }


def departures(config: PrecisionConfig) -> list[dict[str, Any]]:
    """Overrides that make the run differ from the published recipe: override, published, used, and words for it."""
    found = []
    for knob in KNOBS:
        used, choices = getattr(config, knob), getattr(config.knobs, knob)
        if choices and used != choices[0]:
            off = knob in OFF_VALUES and used == OFF_VALUES[knob]
            start = "left out" if off else "added" if choices[0] is None else "changed"
            now = "" if off else f" {written(used)}"
            words = f"{start}: {KNOB_WORDS[knob]}{now} (published: {written(choices[0])})"
            found.append({"override": knob, "published": choices[0], "used": used, "words": words})
    if config.gemm != "exact":
        words = f"changed: GEMM {config.gemm} (published: exact)"
        found.append({"override": "gemm", "published": "exact", "used": config.gemm, "words": words})
    return found


def _stage(step: int, passes: Any, start: str) -> dict[str, Any]:
    return {"step": step, "start": start, "forward": passes.forward, "backward": passes.backward}


def _rules(kind: str, config: PrecisionConfig, assignments: Sequence[LinearPrecision]) -> list[dict[str, Any]]:
    """Each rule with how many linears it decided; a recipe's own rule may decide none."""
    counts = Counter(assignment.decided_by for assignment in assignments)
    return [
        {**asdict(rule), "decided": counts[rule_name(kind, index, rule)]}
        for index, rule in enumerate(getattr(config, kind))
    ]


def _linear(assignment: LinearPrecision) -> dict[str, Any]:
    gemms = {
        gemm: {
            "format": assignment.gemm_formats[gemm],
            **{name: asdict(operand) for name, operand in pair.items()},
        }
        for gemm, pair in assignment.operands.items()
    }
    return {
        "name": assignment.name,
        "block": assignment.block,
        "letter": assignment.letter,
        "role": assignment.role,
        "in_features": assignment.in_features,
        "out_features": assignment.out_features,
        "format": assignment.format,
        **gemms,
        "decided_by": assignment.decided_by,
        "reason": assignment.reason,
    }


def summary(report: Mapping[str, Any]) -> list[str]:
    """The report in a few lines: coverage, each role, widths that do not fit, what is not as published, phases."""
    share = report["coverage"]
    lines = [
        f"precision {report['recipe']} ({report['backend']}): {share['linear_percent']:.1f}% of linear GEMM FLOPs and "
        f"{share['total_percent']:.1f}% of all FLOPs in low precision"
    ]
    by_role: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for linear in report["linears"]:
        by_role.setdefault((linear["letter"] or "", linear["role"]), []).append(linear)
    lines += [f"  {letter:1} {role:8} {_formats_of(linears)}" for (letter, role), linears in by_role.items()]
    lines += _misfits(report["linears"])
    if report["departures"]:
        lines.append("; ".join(departure["words"] for departure in report["departures"]))
    lines += [_phase_line(stage) for stage in report["phases"] if stage["step"] > 1 or _passes(stage) != Passes()]
    unused = [rule for rule in report["recipe_rules"] if not rule["decided"]]
    if unused:
        lines.append(f"unused rules of the recipe: {len(unused)} of {len(report['recipe_rules'])} decide nothing here")
    return lines


def _passes(stage: Mapping[str, Any]) -> Passes:
    return Passes(stage["forward"], stage["backward"])


def _phase_line(stage: Mapping[str, Any]) -> str:
    return f"phase: from step {stage['step']} ({stage['start']}) on, {_passes(stage)}"


def _misfits(linears: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each width that does not fit, with the roles that it keeps in BF16."""
    roles: dict[str, dict[str, None]] = {}
    for linear in linears:
        if MISFIT in linear["reason"]:
            for width in linear["reason"].split("; "):
                roles.setdefault(width, {})[linear["role"]] = None
    return [f"  {', '.join(names)} in BF16: {width}" for width, names in roles.items()]


def _formats_of(linears: Sequence[Mapping[str, Any]]) -> str:
    """`nvfp4 x4, bf16 x1 (blocks 9)`: the blocks are named for all but the most frequent format."""
    found: dict[str, list[int | None]] = {}
    for linear in linears:
        found.setdefault(linear["format"], []).append(linear["block"])
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    parts = []
    for index, (name, blocks) in enumerate(ordered):
        numbers = [block for block in blocks if block is not None]
        parts.append(f"{name} x{len(blocks)}" + (f" (blocks {block_ranges(numbers)})" if index and numbers else ""))
    return ", ".join(parts)


def block_ranges(blocks: Sequence[int]) -> str:
    """Block numbers in a few characters: `0-2, 9`."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(blocks)), key=lambda pair: pair[1] - pair[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ends)
