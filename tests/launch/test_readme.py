"""The page says what the code says: exit codes, and the numbers of the layouts of the 12B."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.scale import ASSUMED, LAYOUTS, README, Scale, tables
from models.shapes import count_parameters, flops_per_token, linear_shapes
from nvfp4_train.exits import ExitCode
from nvfp4_train.memory import Machine, memory
from nvfp4_train.precision.assignment import assign
from tests.launch.conftest import ROOT


@pytest.mark.parametrize("page", [README, ROOT / "nvfp4_train/README.md"])
def test_every_exit_code_is_in_the_table_and_no_other(page: Path) -> None:
    table = page.read_text(encoding="utf-8").split("## Exit codes")[1].split("\n## ")[0]
    found = {int(code): name for code, name in re.findall(r"^\| (\d+) \| ([\w -]+) \|", table, re.MULTILINE)}
    names = {code.value: code.name.lower().replace("_", "-") for code in ExitCode}
    assert {code: name.replace(" error", "") for code, name in found.items()} == names


def test_the_tables_are_those_of_the_script() -> None:
    assert f"<!-- paper-scale -->\n{tables()}<!-- /paper-scale -->" in README.read_text()


@pytest.mark.parametrize(("gpus", "overrides"), LAYOUTS)
def test_a_layout_uses_all_gpus_and_fits(gpus: int, overrides: tuple[str, ...]) -> None:
    scale = Scale(gpus, overrides)
    assert scale.tensor * scale.pipeline * scale.context * scale.data == gpus
    assert sum(scale.memory.values()) < ASSUMED.memory
    assert sum(stage.parameters for stage in scale.stages) == count_parameters(scale.config.model) == 12_310_001_152
    whole = flops_per_token(scale.config.model, 8192).training
    assert sum(stage.flops for stage in scale.stages) == whole
    assert 0 < scale.mfu < ASSUMED.efficiency
    # what a step computes, by the whole model's operations and by what each GPU is given
    seconds = whole * scale.config.data.global_batch * 8192 / (gpus * 989e12 * ASSUMED.efficiency)
    assert scale.seconds["compute"] == pytest.approx(seconds, rel=0.1)  # the slowest stage has a little more


def test_one_gpu_that_holds_everything_needs_what_the_plan_says() -> None:
    scale = Scale(1, ("parallel.sequence=false", "data.global_batch=1", "parallel.distributed_optimizer=false",
                      "parallel.overlap_param_gather=false"))  # fmt: skip
    config = scale.config
    planned = memory(config.model, assign(config.precision, linear_shapes(config.model)), 8192, Machine())
    assert sum(scale.memory.values()) == pytest.approx(planned.total)
    assert sum(scale.traffic.values()) == 0
    assert scale.mfu == pytest.approx(ASSUMED.efficiency)


def test_what_divides_by_what() -> None:
    small, large = Scale(64, ("parallel.tensor=2",)), Scale(64, ("parallel.tensor=4",))
    for part in ("weights", "gradients", "weight_cache"):
        assert small.memory[part] == pytest.approx(2 * large.memory[part])
    assert small.memory["moments"] == pytest.approx(8 * 12_310_001_152 / 64)
    assert small.memory["activations"] == pytest.approx(2 * large.memory["activations"])
    assert small.traffic["gradients"] == pytest.approx(4 * 12_310_001_152 / 2 * 31 / 32)
    # 62 blocks, of whose 62 column-parallel linears all but the quantized-kept ones gather their input again
    token = 2 * 5120 * 8192 * 23 / 2
    assert small.traffic["tensor"] / token == pytest.approx(5 * 62 + 2 + 3)
    half = Scale(128, ("parallel.tensor=2", "parallel.context=2"))
    assert half.memory["activations"] == pytest.approx(small.memory["activations"] / 2)
    assert half.traffic["context"] > 0 == small.traffic["context"]


def test_a_pipeline_holds_as_many_micro_batches_as_it_has_stages() -> None:
    one, two = Scale(64, ("parallel.tensor=2",)), Scale(64, ("parallel.tensor=2", "parallel.pipeline=2"))
    assert two.bubble == pytest.approx(1 / (46 + 1))
    assert two.traffic["pipeline"] == 2 * 5120 * 8192 / 2 * 46
    assert two.memory["weights"] == pytest.approx(one.memory["weights"] / 2, rel=0.05)
    assert two.memory["activations"] == pytest.approx(one.memory["activations"], rel=0.1)


def test_failures() -> None:
    scale = Scale(512, LAYOUTS[1][1])
    assert scale.between_failures == pytest.approx(50_000 * 3600 / 512)
    assert scale.checkpoint_bytes == 12 * 12_310_001_152
    assert scale.write == pytest.approx(12 * 12_310_001_152 / 100e9)
    # saving more or less often loses more
    for factor in (0.5, 2.0):
        interval = scale.interval * factor
        assert (
            scale.write / interval + interval / 2 / scale.between_failures > scale.lost - 600 / scale.between_failures
        )
