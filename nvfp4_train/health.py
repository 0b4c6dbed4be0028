"""`python -m nvfp4_train.health RUN`: the ten worst-quantized tensors of a run, and the override that would mend them.

The run must have sampled its quantization health (`logging.health_every=50`). No torch here.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvfp4_train.exits import ExitCode, guarded

if TYPE_CHECKING:
    from nvfp4_train.comparison.quant import TensorHealth
    from nvfp4_train.comparison.runs import Run

WORST = 10

# 1 where a statistic deserves a look. NVFP4 of Gaussian data has 7%, 20 dB and -.7% (16x16 tiles: -1.1%), with
# stochastic rounding about 17 dB and -.2%, since its largest values are clipped.
SEVERITY: dict[str, Callable[[float], float]] = {
    "flushed": lambda share: share / 0.2,
    "sqnr_db": lambda decibels: 10 ** ((14 - decibels) / 20),
    "bias": lambda bias: abs(bias) / 0.02,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="nvfp4_train.health",
        description="Prints the ten worst-quantized tensors of a run (share flushed to zero, signal to noise, "
        "bias), with an override that moves their linears to a wider format.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder, trained with logging.health_every=N")
    arguments = parser.parse_args(argv)
    return guarded(lambda: run(arguments.run))


def run(folder: Path) -> ExitCode:
    """Print the worst tensors of the run in `folder` and what to do. Raises CompareError where it sampled none."""
    from rich.table import Table

    from nvfp4_train.comparison.quant import sampled, tensors
    from nvfp4_train.comparison.runs import CompareError, open_run
    from nvfp4_train.console import table_console

    found = open_run(folder)
    health = [tensor for tensor in tensors(found.quant) if severity(tensor) > 0]
    if not health:
        raise CompareError(
            f"{folder}: sampled no quantization health. Train with logging.health_every=50, then ask again."
        )
    title = f"{found.name}, {sampled(health, found.quant_steps)}: worst {min(WORST, len(health))} of {len(health)}"
    table = Table(title=title, title_justify="left")
    for heading in ("linear", "operand", "flushed", "SQNR", "bias", "what stands out"):
        table.add_column(heading, justify="left" if heading in ("linear", "operand") else "right", no_wrap=True)
    for tensor in sorted(health, key=severity, reverse=True)[:WORST]:
        table.add_row(*_row(tensor))
    console = table_console()
    console.print(table)
    console.print(advice(found, health), markup=False, soft_wrap=True)
    return ExitCode.DONE


def severity(tensor: TensorHealth) -> float:
    """How bad the worst statistic of a tensor is: 1 and above deserves a look; 0 where it has none of them."""
    return max(_severities(tensor).values(), default=0.0)


def _severities(tensor: TensorHealth) -> dict[str, float]:
    """By statistic. Gradients that become zero at random are no loss: a backward pass needs them right on average."""
    judged = [name for name in SEVERITY if name != "flushed" or tensor.operand.startswith("fprop")]
    known = {name: tensor.statistics[name] for name in judged if name in tensor.statistics}
    return {name: SEVERITY[name](value) for name, value in known.items() if math.isfinite(value)}


def _row(tensor: TensorHealth) -> tuple[str, ...]:
    flushed, noise, bias = (tensor.statistics.get(name, math.nan) for name in SEVERITY)
    bad = [name for name, value in _severities(tensor).items() if value >= 1]
    numbers = f"{100 * flushed:.2f}%", f"{noise:.1f} dB", f"{100 * bias:.2f}%"
    return tensor.linear, tensor.operand, *numbers, ", ".join(bad) or "-"


def advice(found: Run, health: Sequence[TensorHealth]) -> str:
    """What to write on the command line so that the linears that deserve a look run in a wider format."""
    sick = {tensor.linear: tensor.last_name for tensor in health if severity(tensor) >= 1}
    if not sick:
        return "Nothing stands out: no tensor loses more than its format is known to lose."
    formats = {linear["name"]: linear["format"] for linear in (found.precision or {}).get("linears", [])}
    everyone = {tensor.linear: tensor.last_name for tensor in health}
    rules: list[dict[str, Any]] = []
    for last_name in dict.fromkeys(sick.values()):
        names = [linear for linear, name in sick.items() if name == last_name]
        common = 2 * len(names) >= list(everyone.values()).count(last_name)
        wide = any("fp8" in formats.get(linear, "") for linear in names)
        matches = [f"*.{last_name}"] if common else names
        rules += [{"match": match, "format": "bf16" if wide else "mxfp8"} for match in matches]
    config: Mapping[str, Any] = (found.config or {}).get("precision") or {}
    override = ", ".join(_rule_text(rule) for rule in [*rules, *(config.get("rules") or [])])
    return f"To run these linears in a wider format:\n  'precision.rules=[{override}]'"


def _rule_text(rule: Mapping[str, Any]) -> str:
    """A rule as an override writes it; globs in quotes."""
    ordered = [(key, rule[key]) for key in ("match", "letter", "role", "format") if rule.get(key) is not None]
    return (
        "{"
        + ", ".join(f'{key}: "{value}"' if key in ("match", "letter") else f"{key}: {value}" for key, value in ordered)
        + "}"
    )


if __name__ == "__main__":
    sys.exit(main())
