"""Layouts under NCCL against one process, on a GPU each where there are two, else on one GPU that both share.

What is bit for bit on a CPU (`test_agreement`) is so here, but for replicas of quantized linears: one process adds its
second product, times a tensor scale, to the first in one rounding, within the GEMM; replicas round both and add then.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from nvfp4_train.exits import ExitCode
from tests.launch.conftest import ROOT, children, free_port, launcher, lines_of, start, wait_until
from tests.parallel.launches import Runs
from tests.parallel.processes import SHARED
from tests.parallel.test_agreement import (
    BOUNDS,
    CONTEXT,
    INTERLEAVED,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    check_copies,
    check_gradients,
    check_losses,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS, SAVED = 8, 4
# The quickstart's model with Mamba heads that mamba-ssm's kernels take.
ALWAYS = [
    "experiment=quickstart",
    "model.mamba_num_heads=16",
    "model.mamba_head_dim=32",
    "model.mamba_state_dim=60",
    "optimizer.lr=1e-3",
    f"stop_after={STEPS}",
    "checkpoint.every=0",
    "evaluation.every=0",
    "evaluation.sequences=0",
    "logging.wandb=disabled",
]
REPLICAS = {"data": [], "replicas": ["parallel=replicas"]}
PIPELINES = {"pipeline": [PIPELINE], "interleaved": [PIPELINE, INTERLEAVED, "model.pattern=M-|M*-|M-|M*-"]}
SPLIT = {"tensor": [TENSOR], "sequence": [TENSOR, SEQUENCE], "context": [CONTEXT]}
ALL = REPLICAS | PIPELINES | SPLIT
LAYOUTS = {"bf16": ["data", "pipeline", "sequence", "context"], "nvfp4": [*ALL], "fp8_block": ["sequence"]}
PAIRS = [(layout, recipe) for recipe, layouts in LAYOUTS.items() for layout in layouts]
EQUAL = [pair for pair in PAIRS if pair[0] in PIPELINES or pair == ("data", "bf16")]
CLOSE = [pair for pair in PAIRS if pair not in EQUAL]


def jobs(folder: Path) -> dict[int, dict[str, list[str]]]:
    """Processes -> name -> overrides. `goes on` takes over from replicas after SAVED steps."""
    two = {f"{layout} {recipe}": [f"precision={recipe}", *ALL[layout]] for layout, recipe in PAIRS}
    two["replicas nvfp4"].append(f"checkpoint.every={SAVED}")
    saved = folder / "replicas nvfp4" / "checkpoints" / f"step-{SAVED:08}"
    two["goes on"] = ["precision=nvfp4", *SPLIT["sequence"], f"resume={saved}"]
    return {1: {f"one {recipe}": [f"precision={recipe}"] for recipe in LAYOUTS}, 2: two}


@pytest.fixture(scope="module")
def where(prepared: Path) -> list[str]:
    """Our own text: real, and enough of it. On few words in any order layouts part further in nvfp4."""
    return [*ALWAYS, f"data.path={ROOT / 'nvfp4_train'}", f"data.prepared={prepared}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, where: list[str]) -> Runs:
    folder = tmp_path_factory.mktemp("parallel")
    made = Runs(folder, where)
    made.launch(jobs(folder), gpus=torch.cuda.device_count())
    return made


@pytest.mark.parametrize(("layout", "recipe"), EQUAL)
def test_bit_for_bit(runs: Runs, layout: str, recipe: str) -> None:
    name = f"{layout} {recipe}"
    for line, expected in zip(runs.metrics(name), runs.metrics(f"one {recipe}"), strict=True):
        for key in ("step", "train/loss", "optim/grad_norm", "data/hash"):
            assert line[key] == expected[key], (line["step"], key)
    mine, weights = runs.whole(name, "weights"), runs.whole(f"one {recipe}", "weights")
    assert set(mine) == set(weights)
    for parameter, weight in weights.items():
        assert torch.equal(mine[parameter], weight), parameter


def test_replicas_differ_in_last_bits_of_quantized_linears_alone(runs: Runs) -> None:
    scales = runs.found["one nvfp4"][0]["scales"]
    quantized = {f"{name.split()[0]}.weight" for name in scales if name.endswith(" weight")}
    mine, alone = runs.whole("data nvfp4", "gradients"), runs.whole("one nvfp4", "gradients")
    assert quantized < set(alone) == set(mine)
    for parameter, gradient in alone.items():
        difference = float((mine[parameter] - gradient).norm() / gradient.norm())
        assert difference < (1e-6 if parameter in quantized else 1e-30), parameter


@pytest.mark.parametrize(("layout", "recipe"), CLOSE)
def test_as_close_as_rounding_allows(runs: Runs, layout: str, recipe: str) -> None:
    check_losses(runs, f"{layout} {recipe}", recipe)


@pytest.mark.parametrize(("layout", "recipe"), [pair for pair in PAIRS if pair[0] in SPLIT])
def test_every_gradient_is_that_of_one_process(runs: Runs, layout: str, recipe: str) -> None:
    check_gradients(runs, f"{layout} {recipe}", recipe, heads=3)


def test_copies_are_the_same_bits_in_the_end(runs: Runs) -> None:
    check_copies(runs)


def test_ranks_that_share_a_tensor_agree_on_its_scale(runs: Runs) -> None:
    for layout in SPLIT:
        first, second = (found["scales"] for found in runs.found[f"{layout} nvfp4"])
        assert first
        assert set(first) == set(second)
        assert all(torch.equal(scale, second[name]) for name, scale in first.items())


def test_another_layout_goes_on_from_a_checkpoint(runs: Runs) -> None:
    lines, alone = runs.metrics("goes on"), runs.metrics("one nvfp4")[SAVED:]
    assert [line["step"] for line in lines] == list(range(SAVED + 1, STEPS + 1))
    for line, expected in zip(lines, alone, strict=True):
        assert line["data/hash"] == expected["data/hash"]
        assert line["train/loss"] == pytest.approx(expected["train/loss"], rel=3 * BOUNDS["nvfp4"])


def test_two_nodes_through_the_launcher_end_when_a_rank_is_killed(tmp_path: Path, where: list[str]) -> None:
    """As a user starts them, each on the first GPU of its node, here the same one; the other rank waits in NCCL."""
    run, outputs = tmp_path / "run", [tmp_path / "0", tmp_path / "1"]
    options = ["--nodes", "2", "--head", f"localhost:{free_port()}", "--processes", "1"]
    overrides = [*where, "precision=nvfp4", "steps=100000", "stop_after=100000", f"run_dir={run}"]
    nodes = []
    for rank, output in enumerate(outputs):
        command = launcher(*options, "--node-rank", str(rank), "--", *overrides)
        nodes.append(start(command, output, NCCL_HOSTID=f"host {rank}", **SHARED))
    wait_until(lambda: lines_of(run / "metrics.jsonl") >= STEPS, nodes[0], outputs[0])
    os.kill(children(nodes[1].pid)[0], signal.SIGKILL)
    for process, output in zip(nodes, outputs, strict=True):
        assert process.wait(timeout=30) == ExitCode.INTERNAL, output.read_text()
    first, second = (output.read_text() for output in outputs)
    assert "layout: 2 processes, 2 replicas of one process" in first
    assert "waited for rank 1 on " in first.splitlines()[-1]
    assert second.splitlines()[-1].endswith(" was killed by SIGKILL")
