"""A layout built without its memory and its processes: every stage, and together the whole model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

from models.shapes import count_parameters, linear_shapes
from nvfp4_train.compose import compose
from nvfp4_train.layout import check_run
from nvfp4_train.memory import memory
from nvfp4_train.precision.assignment import assign
from nvfp4_train.schema import to_yaml

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, list[str]] = {
    "one": [],
    "pipeline 2": ["parallel.pipeline=2"],
    "pipeline 5": ["parallel.pipeline=5"],
    "uneven": ["parallel.pipeline=2", "model.pattern=M-M*-M-|M*-", "precision.bf16_blocks.first=1"],
    "interleaved": ["parallel.pipeline=2", "parallel.virtual_pipeline=5", "data.micro_batch=1"],
    "tensor": ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=5"],
    "context": ["parallel.context=2", "parallel=replicas"],
    "tied": ["parallel.pipeline=2", "model.tie_embeddings=true"],
}
WORLD = 80
BATCH = ["data.global_batch=640"]
PROGRAM = """
import json, sys, yaml
from dataclasses import asdict
from models.shapes import linear_shapes
from nvfp4_train.config import RunConfig
from nvfp4_train.dry_run import dry_run
from nvfp4_train.precision.assignment import assign
from nvfp4_train.schema import from_mapping
found = {}
for name, text in json.load(sys.stdin).items():
    config = from_mapping(RunConfig, yaml.safe_load(text))
    assignments = assign(config.precision, linear_shapes(config.model), config.parallel.tensor)
    found[name] = [asdict(stage) for stage in dry_run(config, assignments, 80)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    """Stages of every layout, from one process that has no process groups of its own."""
    configs = {name: compose([*BATCH, *overrides]) for name, overrides in LAYOUTS.items()}
    for config in configs.values():
        check_run(config, WORLD)
    texts = json.dumps({name: to_yaml(config) for name, config in configs.items()})
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, input=texts, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_stages_hold_the_whole_model(built: dict[str, Any]) -> None:
    whole = count_parameters(compose().model)
    for name in ("one", "pipeline 2", "pipeline 5", "uneven", "interleaved", "context"):
        assert sum(stage["parameters"] for stage in built[name]) == whole, name
    # A tied embedding has a copy on the last stage; tensor-parallel ranks share all but the norms of the stream.
    copy = 384 * 128
    assert sum(stage["parameters"] for stage in built["tied"]) == whole
    norms = 11 * 128
    assert sum(stage["parameters"] for stage in built["tensor"]) == (whole - norms) // 2 + norms
    assert count_parameters(compose(["model.tie_embeddings=true"]).model) == whole - copy


def test_blocks_lie_where_the_cuts_say(built: dict[str, Any]) -> None:
    blocks = {name: [stage["blocks"] for stage in stages] for name, stages in built.items()}
    assert blocks["pipeline 2"] == [["M-M*-"], ["M-M*-"]]
    assert blocks["uneven"] == [["M-M*-M-"], ["M*-"]]
    assert blocks["interleaved"] == [["M", "M", "-", "-", "*"], ["-", "*", "M", "M", "-"]]


def test_every_layout_has_the_same_map_of_precision(built: dict[str, Any]) -> None:
    """What a stage runs in which format adds up to what was decided for the whole model."""
    for name, stages in built.items():
        config = compose([*BATCH, *LAYOUTS[name]])
        decided = assign(config.precision, linear_shapes(config.model), config.parallel.tensor)
        counts: dict[str, int] = {}
        for stage in stages:
            for format_name, count in stage["linears"].items():
                counts[format_name] = counts.get(format_name, 0) + count
        meant = [linear.format for linear in decided]
        assert counts == {format_name: meant.count(format_name) for format_name in set(meant)}, name


def test_memory_of_a_rank(built: dict[str, Any]) -> None:
    """One process needs what the plan says; splits share it as they should."""
    config = compose(BATCH)
    tokens = config.data.micro_batch * config.data.sequence_length
    alone = built["one"][0]["memory"]
    assert alone == asdict(memory(config.model, assign(config.precision, linear_shapes(config.model)), tokens))
    whole = count_parameters(config.model)
    shared = built["context"][0]["memory"]
    assert (shared["weights"], shared["gradients"], shared["moments"]) == (4 * whole, 4 * whole, 8 * whole // WORLD)
    assert shared["activations"] == pytest.approx(alone["activations"] / 2)
    # 1F1B keeps a forward pass for every stage from here on; interleaved ones keep 11 and 9 fifths. A stage that is not
    # the last keeps what it received, as large as the norm at the end.
    for name, kept, share in (("pipeline 2", (2, 1), 1), ("interleaved", (11 / 5, 9 / 5), 1 / 8)):
        first, last = (stage["memory"]["activations"] for stage in built[name])
        received = 4 * config.model.hidden_size * tokens * share
        assert first / kept[0] + last / kept[1] == pytest.approx(alone["activations"] * share + received), name
