"""The worst tensors of a run and the override that is suggested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvfp4_train.comparison.quant import heat_maps, tensors
from nvfp4_train.health import main
from tests.comparison.synthetic import config, make_run

GOOD = {"flushed": 0.01, "saturated": 0.0, "sqnr_db": 20.0, "bias": 0.001, "scale_spread": 3.0, "amax": 2.0}
NAMES = ("mixer.in_proj", "mixer.out_proj")


def sample(blocks: int, **bad: dict[str, float]) -> dict[str, float]:
    """Metrics of `blocks` Mamba blocks; `bad` changes statistics by last name and block: `out_proj_1`."""
    metrics = {"quant/worst_flushed": 0.9}
    for block in range(blocks):
        for name in NAMES:
            linear = f"decoder.layers.{block}.{name}"
            statistics = GOOD | bad.get(f"{name.removeprefix('mixer.')}_{block}", {})
            metrics |= {f"quant/{linear}/fprop_input/{key}": value for key, value in statistics.items()}
            metrics[f"quant/{linear}/weight_gradient/zeros"] = 0.07
    return metrics


def run(folder: Path, metrics: dict[str, float], *, formats: str = "", settings: dict[str, Any] | None = None) -> str:
    path = make_run(folder / "run", np.array([3.0, 2.0]), extra={2: metrics}, settings=settings)
    if formats:
        names = [f"decoder.layers.{block}.{name}" for block in range(8) for name in NAMES]
        report = {"linears": [{"name": name, "format": formats} for name in names]}
        (path / "precision.json").write_text(json.dumps(report))
    return str(path)


def test_worst_first_and_a_rule_for_a_role(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {f"out_proj_{block}": {"flushed": 0.2 + 0.01 * block} for block in range(8)}
    assert main([run(tmp_path, sample(8, **bad))]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if "decoder.layers" in line]
    assert len(rows) == 10
    assert ["layers.7.mixer.out_proj" in rows[0], "layers.6.mixer.out_proj" in rows[1]] == [True, True]
    assert "27.00%" in rows[0]
    assert "step 2: worst 10 of 16" in printed
    assert """'precision.rules=[{match: "*.out_proj", format: mxfp8}]'""" in printed


def test_operands_that_were_last_sampled_at_other_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a run whose forward pass has gone to BF16: the last step that logged any has none of its operands."""
    forward = {"quant/decoder.layers.0.mixer.in_proj/fprop_input/sqnr_db": 20.0}
    backward = {"quant/decoder.layers.0.mixer.in_proj/wgrad_input/sqnr_db": 20.0}
    zeros = {"quant/decoder.layers.0.mixer.in_proj/weight_gradient/zeros": 0.1}
    path = make_run(tmp_path / "run", np.linspace(3.0, 2.0, 5), extra={2: forward, 3: backward, 4: zeros})
    assert main([str(path)]) == 0
    assert "run, steps 2 to 3, each its last sample: worst 2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "bad", [{"flushed": 0.22}, {"sqnr_db": 12.0}, {"bias": -0.03}], ids=lambda bad: next(iter(bad))
)
def test_each_statistic_counts_and_a_lone_linear_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: dict[str, float]
) -> None:
    assert main([run(tmp_path, sample(4, in_proj_3=bad))]) == 0
    printed = capsys.readouterr().out
    first = next(line for line in printed.splitlines() if "decoder.layers" in line)
    assert "decoder.layers.3.mixer.in_proj" in first
    assert first.rstrip(" │").endswith(next(iter(bad)))
    assert """'precision.rules=[{match: "decoder.layers.3.mixer.in_proj", format: mxfp8}]'""" in printed


def test_flushed_gradients_are_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linear = "quant/decoder.layers.0.mixer.in_proj"
    metrics = {f"{linear}/dgrad_gradient/{key}": value for key, value in (GOOD | {"flushed": 0.5}).items()}
    assert main([run(tmp_path, metrics)]) == 0
    assert "Nothing stands out" in capsys.readouterr().out


def test_eight_bits_that_are_not_enough_become_bf16_and_rules_of_the_run_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = [{"match": None, "letter": "*", "role": None, "format": "bf16"}]
    folder = run(
        tmp_path, sample(1, out_proj_0={"bias": 0.5}), formats="mxfp8", settings=config(precision={"rules": rules})
    )
    assert main([folder]) == 0
    expected = """'precision.rules=[{match: "*.out_proj", format: bf16}, {letter: "*", format: bf16}]'"""
    assert expected in capsys.readouterr().out


def test_nothing_stands_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([run(tmp_path, sample(2))]) == 0
    printed = capsys.readouterr().out
    assert "Nothing stands out" in printed
    assert "precision.rules" not in printed


def test_a_run_without_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([run(tmp_path, {})]) == 2
    assert "logging.health_every=50" in capsys.readouterr().err


def test_heat_maps() -> None:
    metrics = sample(2, out_proj_1={"flushed": 0.5})
    metrics["quant/output_layer/fprop_input/flushed"] = 0.9
    flushed, sqnr = heat_maps(tensors(metrics))
    assert flushed.rows == ["in_proj fprop_input", "out_proj fprop_input"]
    assert flushed.columns == ["0", "1"]
    assert flushed.values.tolist() == [[0.01, 0.01], [0.01, 0.5]]
    assert sqnr.values.tolist() == [[20.0, 20.0], [20.0, 20.0]]


def test_heat_maps_leave_gaps_where_a_block_has_no_such_tensor() -> None:
    metrics = {
        "quant/decoder.layers.10.mlp.linear_fc1/fprop_input/flushed": 0.1,
        "quant/decoder.layers.2.mixer.in_proj/fprop_input/flushed": 0.2,
    }
    (flushed,) = heat_maps(tensors(metrics))
    assert (flushed.rows, flushed.columns) == (["fc1 fprop_input", "in_proj fprop_input"], ["2", "10"])
    assert np.isnan(flushed.values).tolist() == [[True, False], [False, True]]
