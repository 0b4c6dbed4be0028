"""Which runs are paired: same batches, seed and model, so that the noise of the batches cancels in their difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvfp4_train.comparison.runs import CompareError, Group, Run
from nvfp4_train.run_folder import FREE_WITHIN_IDENTITY


def pair_up(baseline: Group, group: Group) -> tuple[list[tuple[Run, Run]], list[str]]:
    """The (baseline, run) pairs of two groups, by seed where one holds several; and notes on runs without a partner.

    Raises CompareError where several seeds are given and none is in both.
    """
    if len(baseline.runs) == len(group.runs) == 1:
        return [(baseline.runs[0], group.runs[0])], []
    partners = {run.seed: run for run in baseline.runs}
    pairs = [(partners[run.seed], run) for run in group.runs if run.seed is not None and run.seed in partners]
    if not pairs:
        raise CompareError(
            f"{baseline.name} has seeds {_seeds(baseline)} and {group.name} has {_seeds(group)}: several seeds are "
            "compared seed by seed, and none is in both. Train one with a seed of the other, or give single runs and "
            "--unpaired."
        )
    used = {run.path for pair in pairs for run in pair}
    alone = [run for run in (*baseline.runs, *group.runs) if run.path not in used]
    return pairs, [f"{run.name} (seed {run.seed}) has no partner and is left out" for run in alone]


def _seeds(group: Group) -> str:
    return ", ".join("unknown" if run.seed is None else str(run.seed) for run in group.runs)


def unpaired_reasons(baseline: Run, run: Run) -> list[str]:
    """Why the two are not paired; empty when they are."""
    reasons = _config_reasons(baseline, run)
    common = sorted(set(baseline.train.steps.tolist()) & set(run.train.steps.tolist()))
    if not common:
        return [*reasons, "no step is in both runs"]
    tokens = dict(zip(baseline.train.steps.tolist(), baseline.train.tokens.tolist(), strict=True))
    for step, count in zip(run.train.steps.tolist(), run.train.tokens.tolist(), strict=True):
        if tokens.get(step, count) != count:
            reasons.append(f"tokens differ from step {step} on: {tokens[step]} and {count}")
            break
    for side in (baseline, run):
        missing = sum(step not in side.hashes for step in common)
        if missing:
            reasons.append(f"{side.name} has no data/hash at {missing} of {len(common)} common steps")
    hashed = [step for step in common if step in baseline.hashes and step in run.hashes]
    differing = [step for step in hashed if baseline.hashes[step] != run.hashes[step]]
    if differing:
        reasons.append(
            f"the batches (data/hash) differ at {len(differing)} of {len(common)} common steps, "
            f"first at step {differing[0]}"
        )
    return reasons


def _config_reasons(baseline: Run, run: Run) -> list[str]:
    without = [side.name for side in (baseline, run) if side.config is None]
    if without:
        return [f"{name} has no config.yaml, so its seed and model are unknown" for name in dict.fromkeys(without)]
    assert baseline.config is not None
    assert run.config is not None
    return config_reasons(baseline.config, run.config)


def config_reasons(baseline: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """Why two configurations cannot be those of a pair: another seed or model, or one that says nothing about it."""
    reasons = []
    for key in ("seed", "model"):
        missing = [name for name, config in (("baseline's", baseline), ("run's", run)) if config.get(key) is None]
        if missing:
            reasons.append(f"{key} is not in the {' and the '.join(missing)} config.yaml")
        elif baseline[key] == run[key]:
            continue
        elif isinstance(baseline[key], Mapping) and isinstance(run[key], Mapping):
            differing = [
                name
                for name in dict.fromkeys([*baseline[key], *run[key]])
                if baseline[key].get(name) != run[key].get(name)
            ]
            names = [name for name in differing if f"{key}.{name}" not in FREE_WITHIN_IDENTITY]
            reasons += [f"{key}.{name} differs: {baseline[key].get(name)} and {run[key].get(name)}" for name in names]
        else:
            reasons.append(f"{key} differs: {baseline[key]} and {run[key]}")
    return reasons
