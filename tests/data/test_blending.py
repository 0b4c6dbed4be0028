"""Which source each sample comes from: exact shares, at any point of a run, over phases, and in the batches."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.blending import LONGEST_PERIOD, Blend, Phase, whole_shares
from data.config import DataConfig, DataError, PhaseConfig, SourceConfig, check_weights
from data.corpus import Corpus
from data.loading import Datasets, build_datasets, train_batches, validation_batches
from data.prepare import prepare
from tests.data.conftest import write_jsonl

LENGTH = 16


def strays(weights: list[float], samples: int) -> float:
    """How far a source is from its share, in samples, at its worst within the first `samples`."""
    blend, total, worst = Blend([Phase(0, tuple(weights))]), sum(weights), 0.0
    counts = [0] * len(weights)
    for sample in range(samples):
        source, index = blend.locate(sample)
        assert index == counts[source]
        counts[source] += 1
        worst = max(worst, *(abs(c - (sample + 1) * w / total) for c, w in zip(counts, weights, strict=True)))
    assert blend.counts(samples) == counts
    return worst


@pytest.mark.parametrize("weights", [[3, 1], [0.001, 0.999], [1, 0], [70, 20, 10], [1 / 3, 1 / 3, 1 / 3], [1e-7, 5, 2]])
def test_a_source_keeps_to_its_share_at_any_sample(weights: list[float]) -> None:
    assert strays(weights, 3000) < 1.5


@settings(max_examples=60)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any))
def test_counts_and_places_agree_for_any_weights(weights: list[int]) -> None:
    assert strays([float(w) for w in weights], 200) < 1 + len(weights) / 2


def test_shares_are_whole_and_exact_where_they_can_be() -> None:
    assert whole_shares([70, 20, 10]) == [7, 2, 1]
    assert whole_shares([0.001, 0.999]) == [1, 999]
    assert whole_shares([0.25, 0.5, 0.0]) == [1, 2, 0]
    assert whole_shares([2.5]) == [1]
    shares = whole_shares([1 / 3, 2 / 3, 1e-9, 0])
    assert sum(shares) == LONGEST_PERIOD
    assert shares[2:] == [1, 0]  # the smallest weight is never rounded to nothing
    assert shares[0] / LONGEST_PERIOD == pytest.approx(1 / 3, abs=2e-6)


def test_a_phase_goes_on_where_the_last_one_was() -> None:
    blend = Blend([Phase(0, (3, 1)), Phase(10, (0, 1)), Phase(13, (1, 1))])
    read: dict[int, list[int]] = {0: [], 1: []}
    order = []
    for sample in range(23):
        source, index = blend.locate(sample)
        read[source].append(index)
        order.append(source)
        assert blend.counts(sample + 1) == [len(read[0]), len(read[1])]
    assert read == {0: list(range(len(read[0]))), 1: list(range(len(read[1])))}
    assert order[10:13] == [1, 1, 1]
    assert abs(order[:10].count(0) - 7.5) <= 0.5
    assert order[13:].count(0) == 5
    assert blend.counts(0) == [0, 0]


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([-1, 2], r"data\.sources: web has weight -1"),
        ([math.nan, 1], "web has weight nan"),
        ([0, 0], "every weight is 0"),
        ([1], r"1 weights for 2 sources \(web, code\)"),
    ],
)
def test_bad_weights_are_refused(weights: list[float], words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_weights(weights, ["web", "code"], "data.sources")


def test_names_and_paths_of_sources() -> None:
    def config(path: str | None, *names: str) -> DataConfig:
        sources = tuple(SourceConfig(name, f"/{name}") for name in names)
        return DataConfig(path, "p", 8, 1, 1, sources=sources)

    assert [source.name for source in config(None, "a", "b").blended()] == ["a", "b"]
    for bad, words in (
        (config(None), "neither data.path nor data.sources is given"),
        (config("/x", "a"), "data.path=/x and data.sources are both given"),
        (config(None, "a", "a"), "a is the name of several"),
        (config(None, "a/b"), "'a/b' is part of metrics' names"),
        (
            dataclasses.replace(config(None, "a"), sources=(SourceConfig("a", "/a", weight=-1),)),
            "data.sources: a has weight -1",
        ),
        (
            dataclasses.replace(config(None, "a"), phases=(PhaseConfig(0.5, (1, 2)),)),
            "data.phases: 2 weights for 1 sources",
        ),
        (dataclasses.replace(config("/x"), phases=(PhaseConfig(0.5, (1, 2)),)), "data.phases: 2 weights for 1 sources"),
    ):
        with pytest.raises(DataError, match=words):
            bad.blended()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """A large source, a tiny one and one for validation alone, told apart by their letters."""
    folder = tmp_path_factory.mktemp("blend")
    sizes = {"large": 200, "tiny": 12, "held": 20}
    paths = {
        name: write_jsonl(folder / f"{name}.jsonl", [f"{name[0]}{i:03}{name[0] * 40}" for i in range(count)])
        for name, count in sizes.items()
    }
    return DataConfig(
        path=None,
        prepared=str(folder / "prepared"),
        sequence_length=LENGTH,
        global_batch=8,
        micro_batch=2,
        validation_share=0.1,
        sources=(
            SourceConfig("large", str(paths["large"]), 7),
            SourceConfig("tiny", str(paths["tiny"]), 1),
            SourceConfig("held", str(paths["held"]), 0),
        ),
    )


@pytest.fixture(scope="module")
def corpora(config: DataConfig) -> list[Corpus]:
    return [prepare(config.of_source(source), say=lambda line: None) for source in config.blended()]


def opened(corpora: list[Corpus], config: DataConfig, samples: int = 160, phases: tuple[Phase, ...] = ()) -> Datasets:
    return build_datasets(corpora, config, seed=1, train_samples=samples, validation_samples=100, phases=phases)


def source_of(tokens: list[int]) -> str:
    (letter, _), *_ = Counter(tokens).most_common(1)
    return chr(letter)


def test_batches_hold_the_shares_and_the_counts_are_of_what_was_read(corpora: list[Corpus], config: DataConfig) -> None:
    datasets = opened(corpora, config, phases=(Phase(80, (1, 1, 0)),))
    read = [source_of(row.tolist()) for b in train_batches(datasets, config, consumed_samples=0) for row in b["tokens"]]
    assert len(read) == 160
    assert Counter(read[:80]) == {"l": 70, "t": 10}
    assert Counter(read[80:]) == {"l": 40, "t": 40}
    for done in (0, 8, 80, 96, 160):
        counts = Counter(read[:done])
        wanted = {"large": counts["l"] * LENGTH, "tiny": counts["t"] * LENGTH, "held": 0}
        assert datasets.tokens_read(done) == wanted
    assert datasets.shares == [110 / 160, 50 / 160, 0]


def test_order_within_a_source_is_that_of_the_source_alone(corpora: list[Corpus], config: DataConfig) -> None:
    blended = opened(corpora, config)
    alone = opened(corpora[:1], dataclasses.replace(config, path=str(corpora[0].path), sources=()))
    mixed = [row for i in range(160) if source_of(row := blended[i]["tokens"].tolist()) == "l"]
    assert mixed == [alone[i]["tokens"].tolist() for i in range(len(mixed))]


@pytest.mark.parametrize("data_size", [2, 4])
def test_ranks_share_a_blend_and_resume_in_it(corpora: list[Corpus], config: DataConfig, data_size: int) -> None:
    datasets = opened(corpora, config, phases=(Phase(80, (1, 1, 0)),))
    whole = [row.tolist() for b in train_batches(datasets, config, consumed_samples=0) for row in b["tokens"]]
    ranks = [
        list(train_batches(datasets, config, consumed_samples=72, data_rank=rank, data_size=data_size))
        for rank in range(data_size)
    ]
    rest = [row.tolist() for turn in zip(*ranks, strict=True) for batch in turn for row in batch["tokens"]]
    assert rest == whole[72:]


def test_epochs_of_each_source_are_said_and_capped(corpora: list[Corpus], config: DataConfig) -> None:
    datasets = opened(corpora, config, samples=800)
    lines = datasets.describe()
    per_epoch = datasets.sources[1].train.per_epoch
    tiny = [line for line in lines if line.startswith("data: tiny: ")]
    assert f"100 samples of 16 = 1,600 tokens = {100 / per_epoch:.2f} epochs (12.50% of the run)" in tiny[0]
    assert f"up to {math.ceil(100 / per_epoch)} times" in tiny[1]
    assert "data: from sample 0 on: large 87.50%, tiny 12.50%, held 0.00%" in lines
    capped = tuple(dataclasses.replace(source, max_epochs=2) for source in config.sources)
    opened(corpora, dataclasses.replace(config, sources=capped), samples=8)
    with pytest.raises(DataError, match=rf"tiny would be read {100 / per_epoch:.2f} times, above its max_epochs=2 "):
        opened(corpora, dataclasses.replace(config, sources=capped), samples=800)


def test_validation_is_a_set_for_each_source(corpora: list[Corpus], config: DataConfig) -> None:
    for source in opened(corpora, config).sources:
        batches = list(validation_batches(source, config))
        letters = {
            source_of(row[mask == 1].tolist())
            for batch in batches
            for row, mask in zip(batch["tokens"], batch["loss_mask"], strict=True)
            if mask.any()
        }
        assert letters == {source.name[0]}


def test_sources_of_different_tokenizers_are_refused(corpora: list[Corpus], config: DataConfig, bpe_file: Path) -> None:
    other = prepare(
        dataclasses.replace(config.of_source(config.sources[1]), tokenizer=str(bpe_file)), say=lambda line: None
    )
    with pytest.raises(DataError, match=r"prepared with tokenizer byte and .* with .*tokenizer\.json"):
        opened([corpora[0], other, corpora[2]], config)
