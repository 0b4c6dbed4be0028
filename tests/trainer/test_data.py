"""Blends, phases and packing in a run: metrics by source, resumption to the sample, what a step read, as text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import data.inspect
from data.corpus import open_corpus
from data.loading import batch_hash
from data.record import open_record, read_record
from nvfp4_train.checkpoints.files import CheckpointError
from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.evaluate import score
from nvfp4_train.exits import ExitCode
from nvfp4_train.layout import check_run
from nvfp4_train.metrics import Metrics, read_metrics
from nvfp4_train.trainer import train
from tests.data.conftest import write_jsonl
from tests.trainer.conftest import Make

BLEND = "data.path=null", "data.phases=[{start: 2, weights: [0, 1]}]"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {
        name: write_jsonl(folder / f"{name}.jsonl", [f"{letter * 30} {i} {letter * (i % 50)}\n" for i in range(200)])
        for name, letter in (("letters", "a"), ("digits", "7"))
    }


def blend(sources: dict[str, Path]) -> list[str]:
    """Three to one, and after step 2 the second source alone."""
    listing = ", ".join(
        f"{{name: {name}, path: {path}, weight: {weight}}}"
        for (name, path), weight in zip(sources.items(), (3, 1), strict=True)
    )
    return [f"data.sources=[{listing}]", *BLEND]


def metrics_of(config: RunConfig) -> list[Metrics]:
    return read_metrics(Path(str(config.run_dir)) / "metrics.jsonl")


def test_sources_are_counted_and_scored_apart(make: Make, sources: dict[str, Path]) -> None:
    config = make("bf16", *blend(sources))
    check_run(config)
    assert train(config) == ExitCode.DONE
    lines = metrics_of(config)
    tokens = [(line["data/tokens/letters"], line["data/tokens/digits"]) for line in lines]
    assert tokens == [(3 * 64, 64), (6 * 64, 2 * 64), (6 * 64, 6 * 64), (6 * 64, 10 * 64)]
    assert all(sum(pair) == line["tokens"] for pair, line in zip(tokens, lines, strict=True))
    last = lines[-1]
    shares = {"letters": 6 / 16, "digits": 10 / 16}
    assert last["val/loss"] == pytest.approx(sum(last[f"val/loss/{name}"] * shares[name] for name in shares), rel=1e-9)
    assert last["val/loss/letters"] != last["val/loss/digits"]
    assert last["val/bits_per_byte/digits"] > 0


def test_a_blend_resumes_to_the_sample(make: Make, sources: dict[str, Path]) -> None:
    whole, cut = make("bf16", *blend(sources), run="whole"), make("bf16", *blend(sources), "stop_after=2")
    assert train(whole) == train(cut) == ExitCode.DONE
    rest = make("bf16", *blend(sources))
    assert train(rest) == ExitCode.DONE
    for one, other in zip(metrics_of(whole), metrics_of(rest), strict=True):
        for name in ("step", "train/loss", "data/hash", "data/tokens/letters", "data/tokens/digits"):
            assert one[name] == other[name], (one["step"], name)


@pytest.mark.parametrize("packing", ["documents", "best_fit"])
def test_packed_documents_train(make: Make, packing: str) -> None:
    config = make("bf16", f"data.packing={packing}")
    assert train(config) == ExitCode.DONE
    joined = make("bf16", run="joined")
    assert train(joined) == ExitCode.DONE
    packed_losses, joined_losses = ([line["train/loss"] for line in metrics_of(c)] for c in (config, joined))
    assert packed_losses != joined_losses
    assert packed_losses[-1] == pytest.approx(joined_losses[-1], rel=0.1)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_any_step_is_shown_as_text(
    make: Make, sources: dict[str, Path], packing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make("bf16", *blend(sources), f"data.packing={packing}")
    assert train(config) == ExitCode.DONE
    run = Path(str(config.run_dir))
    capsys.readouterr()
    for step in (1, 4):
        assert data.inspect.main([str(run), "--step", str(step)]) == 0
        shown = capsys.readouterr().out
        hashed = metrics_of(config)[step - 1]["data/hash"]
        first = 4 * (step - 1)
        assert shown.startswith(f"step {step}: samples {first} to {first + 3}, data/hash {hashed} (as the run logged)")
        assert shown.count("--- sample") == 4
        assert ("--- sample 0: letters, epoch 1, row 0" in shown) == (step == 1)
        assert ("aaaa" in shown) == (step == 1)
        assert "--- end of document" in shown or "--- next document" in shown
    command = f"{sys.executable} -m data.inspect {run} --step 1 | true; exit ${{PIPESTATUS[0]}}"
    unread = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (unread.returncode, unread.stderr) == (0, "")  # as `head` leaves it
    datasets = open_record(read_record(run))
    assert batch_hash([datasets[i]["tokens"] for i in range(4)]) == metrics_of(config)[0]["data/hash"]
    for options, words in (
        (["--step", "5"], "the run has steps 1 to 4"),
        (["--step", "0"], "the run has steps 1 to 4"),
        (["--step", "1", "--sample", "4"], "a batch has samples 0 to 3"),
    ):
        assert data.inspect.main([str(run), *options]) == 2
        assert words in capsys.readouterr().err
    assert data.inspect.main([str(run.parent), "--step", "1"]) == 2
    assert "Give the folder of a run that took a step" in capsys.readouterr().err


def other_corpus(record: dict[str, Any], key: str) -> None:
    """Another corpus where the run's stands."""
    path = open_corpus(record["sources"][0]["corpus"]).path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest[key] = "0" * 64
    path.write_text(json.dumps(manifest))


def test_a_checkpoint_is_not_resumed_on_other_data(make: Make, sources: dict[str, Path], tmp_path: Path) -> None:
    own = f"data.prepared={tmp_path / 'own'}"
    config = make("bf16", *blend(sources), own, "stop_after=2")
    assert train(config) == ExitCode.DONE
    record = read_record(Path(str(config.run_dir)))
    rest = make("bf16", *blend(sources), own)
    other_corpus(record, "hash")
    with pytest.raises(CheckpointError, match=r"trained on other data: source letters \w+ there, 0000"):
        train(rest)
    assert data.inspect.main([str(config.run_dir), "--step", "1"]) == 2
    branch = make("bf16", *blend(sources), own, f"resume={config.run_dir}", "steps=3", "data.phases=[]", run="branch")
    assert train(branch) == ExitCode.DONE  # a branch may read other text
    other_corpus(record, "tokenizer_hash")
    single = make("bf16", f"data.path={record['sources'][0]['corpus']}", run="single")
    checkpoint = Path(str(config.run_dir)) / "checkpoints" / "step-00000002"
    with pytest.raises(ValueError, match="makes other ids"):
        score(single, checkpoint, lambda line: None)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.phases=[{start: 0.5, weights: [1]}]"], "1 weights for 2 sources"),
        (["data.phases=[{start: 4, weights: [1, 1]}]"], r"start=4 is after step 4 of 4"),
        (["data.phases=[{start: 3, weights: [1, 1]}, {start: 2, weights: [1, 1]}]"], "Name the phases in order"),
        (["data.path=builtin"], "data.path for one source, or data.sources"),
        (["tokenizer.train=t.json"], r"is for `python -m nvfp4_train\.prepare` alone"),
        (["shard=1/2"], r"shard=1/2: is for `python -m nvfp4_train\.prepare` alone"),
    ],
)
def test_blends_that_are_none(make: Make, sources: dict[str, Path], overrides: list[str], words: str) -> None:
    config = make("bf16", *blend(sources), *overrides)
    with pytest.raises((ConfigError, ValueError), match=words):
        check_run(config)


def test_a_vocabulary_that_does_not_hold_every_id_is_refused_before_anything_is_written(make: Make) -> None:
    config = make("bf16", "model.vocab_size=256")
    with pytest.raises(
        ValueError, match=r"model\.vocab_size is 256, .* the end-of-document token is 256.*=257 or more"
    ):
        train(config)
    assert not Path(str(config.run_dir)).exists()
