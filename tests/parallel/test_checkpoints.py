"""A checkpoint of any layout goes on in any other: weights, moments, histories and the place in the data are the same.

One process trains two steps and saves. From there the state is handed from layout to layout: each loads what the one
before it saved, saves it again in a layout of its own, and takes the third step.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_train import trainer
from nvfp4_train.checkpoints.files import damage
from nvfp4_train.compose import compose
from nvfp4_train.metrics import Metrics, read_metrics
from nvfp4_train.trainer import train
from tests.parallel.checkpoint_worker import Resumed
from tests.parallel.launches import Ranks, launch
from tests.parallel.test_agreement import INTERLEAVED, MODEL, PIPELINE, SEQUENCE, TENSOR
from tests.trainer.test_resume import checkpoint_tensors

pytestmark = pytest.mark.slow

REPLICAS = "parallel=replicas"
# Name -> what it starts from, processes, overrides. Replicas share the optimizer's work, in flat ranges.
CHAIN = {
    "replicas": ("one", 2, [REPLICAS]),
    "tensor": ("replicas", 2, [TENSOR, SEQUENCE]),
    "interleaved": ("tensor", 2, [PIPELINE, INTERLEAVED]),
    "cases": ("interleaved", 2, [REPLICAS, "precision=nvfp4", "name=cases"]),
    "tensor and pipeline": ("replicas", 4, [TENSOR, PIPELINE]),
    "tensor and replicas": ("tensor and pipeline", 4, [TENSOR, REPLICAS]),
    "one again": ("tensor and replicas", 1, []),
}
GO_ON = [name for name in CHAIN if name != "cases"]
BITWISE = ("replicas", "interleaved", "one again")
SAVED = "step-00000002"


class Runs:
    """A run of one process, and those that go on from it."""

    def __init__(self, folder: Path, text: Path, prepared: Path) -> None:
        self.folder = folder
        where = [f"data.path={text}", f"data.prepared={prepared}", "evaluation.every=0", "evaluation.sequences=0"]
        self._always = [*MODEL, *where, "precision=fp8_delayed", "checkpoint.every=2", "stop_after=3"]
        self.found: dict[str, Ranks] = {}

    def go(self) -> None:
        """All of them, in one start."""
        train(compose([*self._always, f"run_dir={self.folder / 'one'}"]))
        jobs = {
            processes: {name: self._overrides(name) for name, (_, size, _) in CHAIN.items() if size == processes}
            for processes in (2, 4)
        }
        self.found = launch(self.folder / "launch", jobs, "tests.parallel.checkpoint_worker")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "Trainer", Resumed)
            train(compose(self._overrides("one again")))

    def _overrides(self, name: str) -> list[str]:
        source, _, layout = CHAIN[name]
        return [*self._always, *layout, f"resume={self.checkpoint(source)}", f"run_dir={self.folder / name}"]

    def checkpoint(self, name: str) -> Path:
        """What a run saved before its third step."""
        return self.folder / name / ("checkpoints" if name == "one" else "loaded") / SAVED

    def third_step(self, name: str) -> Metrics:
        """What a run logged of step 3."""
        (line,) = [line for line in read_metrics(self.folder / name / "metrics.jsonl") if line["step"] == 3]
        return line

    def case(self, name: str) -> list[dict[str, Any]]:
        """What each of two ranks saw of something that went wrong: see `checkpoint_cases`."""
        return [rank["cases"][name] for rank in self.found["cases"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text: Path, prepared: Path, single_process: None) -> Runs:
    made = Runs(tmp_path_factory.mktemp("checkpoints"), text, prepared)
    made.go()
    return made


@pytest.fixture(scope="module")
def saved(runs: Runs) -> dict[str, Tensor]:
    """The state after two steps, as one process saved it."""
    return checkpoint_tensors(runs.checkpoint("one"))


@pytest.mark.parametrize("layout", GO_ON)
def test_the_state_is_the_same_in_every_layout(runs: Runs, saved: dict[str, Tensor], layout: str) -> None:
    """Weights, both moments, Adam's count of steps, and the histories of delayed scaling."""
    kinds = {"", "history ", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."}
    assert kinds <= {key.split("decoder")[0] for key in saved}
    found = checkpoint_tensors(runs.checkpoint(layout))
    assert found.keys() == saved.keys()
    assert float(found["step"]) == 2.0
    for key, value in saved.items():
        assert torch.equal(found[key], value), key


def test_another_recipe_takes_over_all_but_histories_of_scaling(runs: Runs, saved: dict[str, Tensor]) -> None:
    found = checkpoint_tensors(runs.checkpoint("cases"))
    histories = {key for key in saved if key.startswith("history ")}
    assert {key.split(".")[-1] for key in histories} == {"input", "gradient", "weight"}
    assert found.keys() == saved.keys() - histories
    for key, value in found.items():
        assert torch.equal(saved[key], value), key


@pytest.mark.parametrize("layout", GO_ON)
def test_the_next_step_is_the_same_step(runs: Runs, layout: str) -> None:
    """Bit for bit where no sum is split (see `test_agreement`): also over both ends of the chain."""
    line, expected = runs.third_step(layout), runs.third_step("one")
    for key in ("step", "tokens", "data/hash", "optim/lr"):
        assert line[key] == expected[key]
    if layout in BITWISE:
        assert line["train/loss"] == expected["train/loss"]
        assert line["optim/grad_norm"] == expected["optim/grad_norm"]
    else:
        assert line["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-4)
        assert line["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=1e-2)


@pytest.mark.parametrize("layout", ["tensor", "interleaved", "tensor and replicas"])
def test_random_states_are_those_of_each_rank(runs: Runs, layout: str) -> None:
    """Where as many ranks go on."""
    before, after = runs.found[CHAIN[layout][0]], runs.found[layout]
    assert [rank["loaded"] for rank in after] == [rank["saved"] for rank in before]
    assert len({rank["saved"] for rank in before}) == len(before)


FULL = ("CheckpointError", "no room for a checkpoint in")
WRONG = {
    "no room": ("CheckpointError", "bytes are needed and 12,345 are free"),
    "full while writing": FULL,
    "full at the end": FULL,
    "broken disk": ("OSError", "Input/output error (rank 1 on"),
    "another folder": ("CheckpointError", "__1_0.distcp: was written, and the main rank does not see it"),
    "thread dies": ("RuntimeError", "step-00000002 was not written, rank 1 on"),
    "no memory to copy": ("RuntimeError", "MemoryError: copy"),
}


@pytest.mark.parametrize("case", WRONG)
def test_all_ranks_agree_that_a_save_failed_and_what_was_before_it_stays(runs: Runs, case: str) -> None:
    for seen in runs.case(case):
        assert seen["type"] == WRONG[case][0]
        assert WRONG[case][1] in seen["text"]
        assert seen["names"] == ["latest", "step-00000001"]
        assert seen["newest"] == "step-00000001"


def test_training_goes_on_while_a_rank_writes_and_the_checkpoint_is_of_its_step(runs: Runs) -> None:
    for rank, seen in enumerate(runs.case("goes on")):
        assert seen["same"]
        assert seen["step"] == 2
        assert seen["during"]["newest"] == "step-00000001"
        assert [name.split(".")[-1] for name in seen["during"]["names"]] == ["latest", "step-00000001", "tmp"]
        assert seen["after"]["names"] == ["latest", "step-00000001", "step-00000002"]
        requested, *durable = seen["said"]
        assert requested.startswith("checkpoint step-00000002: requested; training waited ")
        said = r"checkpoint step-00000002: durable, .* MB written in [\d.]+ s; training waited [\d.]+ s in all"
        assert [re.fullmatch(said, line) is not None for line in durable] == [True] * (rank == 0)


def test_a_save_that_is_cut_off_is_no_checkpoint_and_goes_with_the_next(runs: Runs) -> None:
    for seen in runs.case("abandoned"):
        assert seen["during"]["newest"] == "step-00000002"
        assert seen["after"]["names"] == ["latest", *(f"step-0000000{step}" for step in (1, 2, 4))]


def test_foreign_code_in_the_file_of_one_rank_is_refused_by_all(runs: Runs) -> None:
    other, reader = runs.case("foreign code")
    assert "is not loaded: it refers to posix.mkdir" in reader["text"]
    assert re.search(r"rank 1 on \S+ loaded no checkpoint: CheckpointError: .*posix\.mkdir", other["text"])
    for seen in (other, reader):
        assert seen["type"] == "CheckpointError"
        assert not seen["ran"]


@pytest.mark.parametrize("harm", ["truncated", "flipped", "swapped"])
def test_a_damaged_shard_is_named_with_its_rank(runs: Runs, harm: str, tmp_path: Path) -> None:
    path = tmp_path / SAVED
    shutil.copytree(runs.checkpoint("tensor and replicas"), path)
    assert damage(path) is None
    first, second = path / "__2_0.distcp", path / "__3_0.distcp"
    content = first.read_bytes()
    if harm == "truncated":
        first.write_bytes(content[:-1])
    elif harm == "flipped":
        first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
    problem = "__2_0.distcp is damaged: its SHA-256 sum is not the one in integrity.json; rank 2 wrote it"
    holds = "; it holds what belongs into __3_0.distcp" if harm == "swapped" else ""
    assert damage(path) == problem + holds
