"""The gap to a baseline while a run is going: what `compare` would say of the run until now."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nvfp4_train.comparison.gap import before_window
from nvfp4_train.comparison.pairing import config_reasons
from nvfp4_train.comparison.runs import METRICS, Curve, open_run


class LiveGap:
    """Gap of the run that is going to the baseline in a run folder, over the last 10% of tokens until now, at equal
    tokens.

    The baseline's metrics are read once; a run that gets beyond their last tokens has no gap from there on.

    Raises CompareError (a ValueError) where the folder holds no metrics to compare with.
    """

    def __init__(self, baseline: str | Path) -> None:
        self._baseline = open_run(Path(baseline))
        self._train = _Trailing(self._baseline.train)
        self._val = _Trailing(self._baseline.val)

    def reasons(self, config: Mapping[str, Any]) -> list[str]:
        """Why a run of this configuration is not paired with the baseline, by seed and model; empty if it may be."""
        if self._baseline.config is None:
            return [f"{self._baseline.name} has no config.yaml, so its seed and model are unknown"]
        return config_reasons(self._baseline.config, config)

    def update(
        self, step: int, tokens: int, train_loss: float | None, val_loss: float | None = None
    ) -> dict[str, float]:
        """Take one step's losses; returns `gap/train` and `gap/val` in percent, each where this step has one."""
        found = {"gap/train": self._train.update(tokens, train_loss), "gap/val": self._val.update(tokens, val_loss)}
        return {name: gap for name, gap in found.items() if gap is not None}

    def restore(self, run_dir: str | Path) -> None:
        """Take the steps that a resumed run has already logged, so that it goes on as if never interrupted."""
        metrics = Path(run_dir) / METRICS
        if not metrics.is_file() or not metrics.stat().st_size:
            return
        run = open_run(Path(run_dir))
        val = dict(zip(run.val.steps.tolist(), run.val.losses.tolist(), strict=True))
        for step, tokens, loss in zip(
            run.train.steps.tolist(), run.train.tokens.tolist(), run.train.losses.tolist(), strict=True
        ):
            self.update(step, tokens, loss, val.get(step))


class _Trailing:
    """Sums of two losses at equal tokens, from which the mean of any last stretch is read off."""

    def __init__(self, baseline: Curve) -> None:
        self._baseline = baseline.finite()
        self._left_out = frozenset(baseline.tokens[~np.isfinite(baseline.losses)].tolist())
        self._tokens: list[int] = []
        self._sums: list[tuple[float, float]] = [(0.0, 0.0)]  # of the baseline's and the run's losses before each point

    def update(self, tokens: int, loss: float | None) -> float | None:
        """The gap in percent with this loss in it; None where either run has no finite loss here."""
        known = self._baseline.tokens
        if loss is None or not np.isfinite(loss) or tokens in self._left_out:
            return None
        if not len(known) or not known[0] <= tokens <= known[-1]:
            return None
        base = float(np.interp(tokens, known, self._baseline.losses))
        self._tokens.append(tokens)
        self._sums.append((self._sums[-1][0] + base, self._sums[-1][1] + loss))
        start = bisect_right(self._tokens, before_window(tokens))
        base_sum, run_sum = (end - begin for begin, end in zip(self._sums[start], self._sums[-1], strict=True))
        return 100 * (run_sum - base_sum) / base_sum
