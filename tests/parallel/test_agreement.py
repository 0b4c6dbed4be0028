"""Every layout trains the same model: data, tensor, sequence, pipeline and context parallelism against one process.

Where no sum is split the numbers are equal bit for bit: pipelines move activations as they are, and two replicas with
a micro-batch each add the same two gradients. Tensor and context parallelism split sums, so that here and there a BF16
number becomes its neighbour. Rounding of operands to few bits carries such a difference on, from whatever it came: one
process in which one number of one activation is its neighbour, once, moves as far (`tests.benchmarks.agreement`). Hence
the wider bounds there.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from models.attention import positions_of_rank
from tests.parallel.launches import Runs, holders
from tests.trainer.conftest import TINY

pytestmark = pytest.mark.slow

RECIPES = ("bf16", "fp8_block", "nvfp4")
# Relative difference of the loss, the mean over STEPS steps; three times that at a step, whose noise is its own.
BOUNDS = {"bf16": 1e-4, "fp8_block": 5e-4, "nvfp4": 2e-3}
GRADIENT_BOUNDS = {"bf16": 1e-2, "fp8_block": 0.1, "nvfp4": 0.2}  # of the 2-norm of each
STEPS, LENGTH = 8, 64
MODEL = [
    *(text for text in TINY if not text.startswith(("steps", "checkpoint", "evaluation.every"))),
    "model.mamba_num_heads=32",
    "model.mamba_head_dim=8",
    "model.mamba_state_dim=56",
    "model.mamba_chunk_size=16",
    f"data.sequence_length={LENGTH}",
    "optimizer.lr=1e-3",
    "checkpoint.every=0",
    f"evaluation.every={STEPS}",
    "steps=120",  # with the warm-up of a run of that length: Adam's first updates are the signs of the gradients
]
TENSOR, PIPELINE, CONTEXT = "parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2"
SEQUENCE, INTERLEAVED = "parallel.sequence=true", "parallel.virtual_pipeline=2"
# Of two processes. Activation recompute and a cut of the pattern change no bit either.
EQUAL = {
    "data": [],
    "replicas": ["parallel=replicas"],
    "pipeline": [PIPELINE, "model.pattern=M-*|-"],
    "interleaved": [PIPELINE, INTERLEAVED, "model.recompute=full"],
}
CLOSE = {"tensor": [TENSOR], "sequence": [TENSOR, SEQUENCE], "context": [CONTEXT]}
SPLIT_TWICE = {"tensor and pipeline": [TENSOR, SEQUENCE, PIPELINE]}  # of four
TIED = ["precision=bf16", "model.tie_embeddings=true"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text: Path, prepared: Path) -> Runs:
    where = [f"data.path={text}", f"data.prepared={prepared}"]
    made = Runs(tmp_path_factory.mktemp("parallel"), [f"stop_after={STEPS}", *MODEL, *where])
    both = {
        f"{layout} {recipe}": [f"precision={recipe}", *overrides]
        for layout, overrides in (EQUAL | CLOSE).items()
        for recipe in RECIPES
    }
    both["sequence nvfp4"].append("stop_after=20")
    both |= {f"{layout} fp8_delayed": ["precision=fp8_delayed", *EQUAL[layout]] for layout in ("data", "interleaved")}
    alone = {f"one {recipe}": [f"precision={recipe}"] for recipe in (*RECIPES, "fp8_delayed")}
    four = {
        f"{layout} {recipe}": [f"precision={recipe}", *overrides]
        for layout, overrides in SPLIT_TWICE.items()
        for recipe in RECIPES
    }
    made.launch({1: alone | {"tied": TIED}, 2: {**both, "tied pipeline": [*TIED, PIPELINE]}, 4: four})
    return made


@pytest.mark.parametrize(
    ("layout", "recipe"), [*product(EQUAL, RECIPES), ("data", "fp8_delayed"), ("interleaved", "fp8_delayed")]
)
def test_bit_for_bit(runs: Runs, layout: str, recipe: str) -> None:
    name = f"{layout} {recipe}"
    for line, expected in zip(runs.metrics(name), runs.metrics(f"one {recipe}"), strict=True):
        for key in ("step", "train/loss", "optim/grad_norm", "data/hash", "val/loss"):
            assert line.get(key) == expected.get(key), (line["step"], key)
    mine, expected_weights = runs.whole(name, "weights"), runs.whole(f"one {recipe}", "weights")
    assert set(mine) == set(expected_weights)
    for parameter, weight in expected_weights.items():
        assert torch.equal(mine[parameter], weight), parameter


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", [*CLOSE, *SPLIT_TWICE])
def test_as_close_as_rounding_allows(runs: Runs, layout: str, recipe: str) -> None:
    check_losses(runs, f"{layout} {recipe}", recipe)


def check_losses(runs: Runs, name: str, recipe: str) -> None:
    """Losses and gradient norms of a run's first steps beside those of one process, on the same batches."""
    bound, differences = BOUNDS[recipe], list[float]()
    lines, expected = runs.metrics(name)[:STEPS], runs.metrics(f"one {recipe}")
    assert lines[0]["train/loss"] == pytest.approx(expected[0]["train/loss"], rel=5e-4)
    for line, alone in zip(lines, expected, strict=True):
        assert line["data/hash"] == alone["data/hash"]
        assert line["optim/grad_norm"] == pytest.approx(alone["optim/grad_norm"], rel=30 * bound), line["step"]
        differences.append(abs(line["train/loss"] / alone["train/loss"] - 1))
    assert max(differences) < 3 * bound, differences
    assert sum(differences) / STEPS < bound, differences


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", [*CLOSE, *SPLIT_TWICE])
def test_every_gradient_is_that_of_one_process(runs: Runs, layout: str, recipe: str) -> None:
    """Before the first update; of replicated parameters too, whose ranks see a share of the tokens each."""
    check_gradients(runs, f"{layout} {recipe}", recipe)


def check_gradients(runs: Runs, name: str, recipe: str, heads: float = 1) -> None:
    """Those of a run beside those of one process.

    Args:
        heads: times the bound of vectors with a number a head, which sum few numbers: quantization moves them more,
            by .10 to .39 of their length in nvfp4 in the model of the quickstart, by the seed.
    """
    mine, alone = runs.whole(name, "gradients"), runs.whole(f"one {recipe}", "gradients")
    assert set(mine) == set(alone)
    for parameter, gradient in alone.items():
        loose = recipe != "bf16" and parameter.rpartition(".")[2] in ("A_log", "D", "dt_bias")
        bound = GRADIENT_BOUNDS[recipe] * (heads if loose else 1)
        assert float((mine[parameter] - gradient).norm() / gradient.norm()) < bound, parameter


def test_copies_are_the_same_bits_in_the_end(runs: Runs) -> None:
    """After 8 steps; after 20 under sequence parallelism in nvfp4."""
    assert len(runs.metrics("sequence nvfp4")) == 20
    check_copies(runs)


def check_copies(runs: Runs) -> None:
    """Every rank that holds a share of a parameter has the same bits of it."""
    compared = 0
    for name, ranks in runs.found.items():
        for parameter, copies in holders(ranks):
            for copy in copies[1:]:
                assert torch.equal(copy, copies[0]), (name, parameter)
                compared += 1
    assert compared > 100


@pytest.mark.parametrize("layout", [*CLOSE, *SPLIT_TWICE])
def test_scales_follow_the_largest_of_the_whole_tensor(runs: Runs, layout: str) -> None:
    """Ranks that share a tensor agree on its scale: that of one process, up to rounding in activations."""
    alone = runs.found["one nvfp4"][0]["scales"]
    seen = set()
    for found in runs.found[f"{layout} nvfp4"]:
        for name, scale in found["scales"].items():
            if name.endswith("weight"):
                assert torch.equal(scale, alone[name]), name
            else:
                assert float(scale) == pytest.approx(float(alone[name]), rel=0.1), name
            others = [other["scales"][name] for other in runs.found[f"{layout} nvfp4"] if name in other["scales"]]
            assert all(torch.equal(scale, other) for other in others), name
            seen.add(name)
    assert seen == set(alone)


@pytest.mark.parametrize(("layout", "share"), [("context", 0.99), ("tensor", 0.58), ("sequence", 0.58)])
def test_random_bits_hang_on_the_place_in_the_whole(runs: Runs, layout: str, share: float) -> None:
    """Elements of a stochastically rounded gradient go the way they go in one process.

    All of them under context parallelism, where nothing before was rounded otherwise. Tensor parallelism rounded its
    partial sums, so that elements lie elsewhere between their neighbours: 0.63 to 0.66 of them agree, and 0.51 with the
    bits of another place.
    """
    alone = runs.found["one nvfp4"][0]["values"]
    for found in runs.found[f"{layout} nvfp4"]:
        mine, expected = found["values"], alone
        if layout == "context":
            places = positions_of_rank(found["context_rank"], 2, LENGTH // 2, torch.device("cpu"))
            expected = alone.view(LENGTH, -1, alone.shape[1])[places].flatten(0, 1)
        else:
            expected = alone.chunk(2, 1)[found["tensor_rank"]]
        assert mine.shape == expected.shape
        some = (mine != 0) | (expected != 0)
        same = torch.isclose(mine, expected, rtol=0.15, atol=0)  # a block scale may be a neighbouring one
        assert float(same[some].double().mean()) > share


def test_histories_of_delayed_scaling_see_all_ranks(runs: Runs) -> None:
    alone = runs.found["one fp8_delayed"][0]["histories"]
    assert alone
    for layout in ("data", "interleaved"):
        mine = {
            name: history
            for found in runs.found[f"{layout} fp8_delayed"]
            for name, history in found["histories"].items()
        }
        assert set(mine) == set(alone)
        assert all(torch.equal(mine[name], history) for name, history in alone.items())


def test_a_tied_embedding_over_two_stages(runs: Runs) -> None:
    """Its gradient is the sum of both uses, added in another order; both copies stay the same."""
    for line, alone in zip(runs.metrics("tied pipeline"), runs.metrics("tied"), strict=True):
        assert line["train/loss"] == pytest.approx(alone["train/loss"], rel=1e-4)
        assert line["optim/grad_norm"] == pytest.approx(alone["optim/grad_norm"], rel=1e-3)
    first, last = (found["weights"] for found in runs.found["tied pipeline"])
    assert torch.equal(first["embedding.word_embeddings.weight"][0], last["output_layer.weight"][0])
