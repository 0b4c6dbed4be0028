"""Every sample is what the corpus holds, in an order that no layout, worker or resumption changes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from data.config import DataConfig, DataError
from data.corpus import Corpus
from data.loading import (
    Batch,
    Datasets,
    batch_hash,
    build_datasets,
    combine,
    sample_digest,
    train_batches,
    validation_batches,
)
from data.prepare import prepare
from tests.data.conftest import numbered, write_jsonl

LENGTH = 32


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = tmp_path_factory.mktemp("loading")
    texts = ["a", "b" * (LENGTH - 1), "c" * (3 * LENGTH), *numbered(120, size=71)]
    return DataConfig(
        path=str(write_jsonl(folder / "a.jsonl", texts)),
        prepared=str(folder / "prepared"),
        sequence_length=LENGTH,
        global_batch=12,
        micro_batch=2,
        validation_share=0.1,
    )


@pytest.fixture(scope="module")
def corpus(config: DataConfig) -> Corpus:
    return prepare(config, say=lambda line: None)


@pytest.fixture(scope="module")
def datasets(corpus: Corpus, config: DataConfig) -> Datasets:
    """20 steps of 12 samples: within one epoch."""
    return build_datasets([corpus], config, seed=3, train_samples=240, validation_samples=1000)


def rows(batches: list[Batch], field: str = "tokens") -> list[list[int]]:
    return [row.tolist() for batch in batches for row in batch[field]]


def stored(corpus: Corpus, split: str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    indexed = IndexedDataset(corpus.prefix(split))
    return [indexed[i].tolist() for i in range(len(indexed))]


def test_samples_are_the_joined_documents_cut_to_length(corpus: Corpus, config: DataConfig) -> None:
    samples = (corpus.train.tokens - 1) // LENGTH
    datasets = build_datasets([corpus], config, seed=3, train_samples=samples, validation_samples=1)
    documents = stored(corpus, "train")
    index = datasets.sources[0].train._index(0)
    stream = [token for i in index.document_index for token in documents[i]]
    assert Counter(index.document_index.tolist()) == Counter(range(len(documents)))
    wanted = Counter(tuple(stream[i * LENGTH : (i + 1) * LENGTH + 1]) for i in range(samples))
    got = Counter[tuple[int, ...]]()
    for i in range(samples):
        sample = datasets[i]
        tokens, labels = sample["tokens"].tolist(), sample["labels"].tolist()
        assert tokens[1:] == labels[:-1]
        assert sample["loss_mask"].tolist() == [1.0] * LENGTH
        got[*tokens, labels[-1]] += 1
    assert got == wanted
    assert sum(sample[1:].count(256) for sample in got.elements()) >= len(documents) - 1  # the end is a target


def test_micro_batches_have_the_promised_shapes(datasets: Datasets, config: DataConfig) -> None:
    batches = list(train_batches(datasets, config, consumed_samples=0))
    assert len(batches) == 240 // 2
    for batch in batches:
        assert {name: (one.dtype, tuple(one.shape)) for name, one in batch.items()} == {
            "tokens": (torch.int64, (2, LENGTH)),
            "labels": (torch.int64, (2, LENGTH)),
            "loss_mask": (torch.float32, (2, LENGTH)),
        }


def test_resumption_continues_exactly(corpus: Corpus, config: DataConfig) -> None:
    def fresh() -> Datasets:
        return build_datasets([corpus], config, seed=3, train_samples=240, validation_samples=1)

    whole = list(train_batches(fresh(), config, consumed_samples=0))
    rest = list(train_batches(fresh(), config, consumed_samples=120))
    assert rows(rest) == rows(whole)[120:]
    assert rows(rest, "labels") == rows(whole, "labels")[120:]
    assert list(train_batches(fresh(), config, consumed_samples=240)) == []


def test_workers_change_nothing(datasets: Datasets, config: DataConfig) -> None:
    batches = train_batches(datasets, dataclasses.replace(config, workers=2), consumed_samples=24)
    assert rows(list(batches)) == rows(list(train_batches(datasets, config, consumed_samples=24)))


def test_random_state_is_left_alone(datasets: Datasets, config: DataConfig) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    list(train_batches(datasets, config, consumed_samples=0))
    list(validation_batches(datasets.sources[0], config))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


@pytest.mark.parametrize("data_size", [2, 3, 6])
def test_ranks_share_the_global_batch_without_overlap(datasets: Datasets, config: DataConfig, data_size: int) -> None:
    alone = rows(list(train_batches(datasets, config, consumed_samples=0)))
    ranks = [
        list(train_batches(datasets, config, consumed_samples=0, data_rank=rank, data_size=data_size))
        for rank in range(data_size)
    ]
    assert {len(rank) for rank in ranks} == {240 // 2 // data_size}
    together = [row for turn in zip(*ranks, strict=True) for batch in turn for row in batch["tokens"].tolist()]
    assert together == alone
    hashes = [batch_hash(np.array(rows_)) for rows_ in (together[:12], alone[:12])]
    assert hashes[0] == hashes[1]


def test_order_does_not_hang_on_the_length_of_the_run(corpus: Corpus, config: DataConfig) -> None:
    epoch = (corpus.train.tokens - 1) // LENGTH
    counts = [epoch // 2 // 12 * 12, epoch // 12 * 12, 3 * epoch // 12 * 12]
    read = [
        rows(list(train_batches(made, config, consumed_samples=0)))
        for made in (build_datasets([corpus], config, seed=3, train_samples=n, validation_samples=1) for n in counts)
    ]
    assert read[2][: counts[1]] == read[1]
    assert read[1][: counts[0]] == read[0]


def test_order_follows_the_seed_and_the_sequence(corpus: Corpus, config: DataConfig) -> None:
    def first(seed: int) -> list[list[int]]:
        made = build_datasets([corpus], config, seed=seed, train_samples=120, validation_samples=1000)
        return rows(list(train_batches(made, config, consumed_samples=0)))

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_validation_scores_every_token_once_whatever_the_seed(corpus: Corpus, config: DataConfig) -> None:
    documents = stored(corpus, "validation")
    scored = []
    for seed in (1, 2):
        made = build_datasets([corpus], config, seed=seed, train_samples=12, validation_samples=1000)
        source = made.sources[0]
        assert source.validation_samples == source.validation.per_epoch == -(-(corpus.validation.tokens - 1) // LENGTH)
        assert (corpus.validation.tokens - 1) % LENGTH  # so there is a padded sample
        scored.append(list(validation_batches(made.sources[0], config)))
    assert rows(scored[0]) == rows(scored[1])
    counted = Counter[int]()
    for batch in scored[0]:
        assert batch["tokens"].shape == (2, LENGTH)
        assert int(batch["tokens"].min()) >= 0
        counted.update(batch["labels"][batch["loss_mask"] == 1].tolist())
    first = made.sources[0].validation._index(0).document_index[0]
    every = Counter(token for document in documents for token in document)
    every[documents[first][0]] -= 1  # the first token of all has nothing before it
    assert counted == +every


def test_padding_of_one_sample_is_not_that_of_another(corpus: Corpus, config: DataConfig) -> None:
    """The padded sample is read first here, and the masks of the others must still be whole."""
    made = build_datasets([corpus], config, seed=1, train_samples=12, validation_samples=1000)
    validation = made.sources[0].validation
    count = validation.per_epoch
    padded = validation._index(0).shuffle_index.tolist().index(count - 1)
    valid = (corpus.validation.tokens - 1) % LENGTH
    for i in (padded, *range(count)):
        assert int(validation.row(i)["loss_mask"].sum()) == (valid if i == padded else LENGTH)


@pytest.mark.parametrize("data_size", [1, 3])
def test_validation_is_filled_up_so_that_ranks_stay_together(
    corpus: Corpus, config: DataConfig, data_size: int
) -> None:
    made = build_datasets([corpus], config, seed=1, train_samples=12, validation_samples=7)
    ranks = [
        list(validation_batches(made.sources[0], config, data_rank=rank, data_size=data_size))
        for rank in range(data_size)
    ]
    assert {len(rank) for rank in ranks} == {4 if data_size == 1 else 2}
    assert all(batch["tokens"].shape == (2, LENGTH) for rank in ranks for batch in rank)
    together = [batch for turn in zip(*ranks, strict=True) for batch in turn]
    kept = [
        row for batch in together for row, mask in zip(batch["tokens"], batch["loss_mask"], strict=True) if mask.any()
    ]
    assert [row.tolist() for row in kept] == [made.sources[0].validation.row(i)["tokens"].tolist() for i in range(7)]
    if data_size == 3:
        assert float(together[-1]["loss_mask"].sum()) == 0  # a micro-batch without a valid token


def test_a_run_longer_than_the_corpus_repeats_it_and_says_so(corpus: Corpus, config: DataConfig) -> None:
    samples = 12 * 100
    made = build_datasets([corpus], config, seed=1, train_samples=samples, validation_samples=4)
    epoch = (corpus.train.tokens - 1) // LENGTH
    epochs = samples / epoch
    assert epochs > 4
    lines = made.describe()
    assert lines[0] == (
        f"data: {corpus.train.tokens:,} training tokens in {corpus.train.documents} documents; the run reads "
        f"1,200 samples of 32 = 38,400 tokens = {epochs:.2f} epochs"
    )
    assert "the run is longer than the corpus" in lines[1]
    assert f"up to {int(epochs) + 1} times, in a new order each time" in lines[1]
    read = rows(list(train_batches(made, config, consumed_samples=0)))
    assert read[:epoch] != read[epoch : 2 * epoch]
    whole = Counter(token for document in stored(corpus, "train") for token in document)
    for start in (0, epoch, 2 * epoch):  # an epoch holds every token but those of the part that fills no row
        got = Counter(token for row in read[start : start + epoch] for token in row)
        assert got <= whole
        assert (whole - got).total() == corpus.train.tokens - epoch * LENGTH


def test_one_line_of_tokens_samples_and_epochs(datasets: Datasets, corpus: Corpus) -> None:
    lines = datasets.describe()
    assert len(lines) == 2
    assert f"{corpus.train.tokens:,} training tokens" in lines[0]
    assert f"240 samples of 32 = 7,680 tokens = {240 / ((corpus.train.tokens - 1) // LENGTH):.2f} epochs" in lines[0]
    count = datasets.sources[0].validation.per_epoch
    assert f"{count} of {count} validation samples a time (of {corpus.validation.tokens} tokens" in lines[1]


def test_a_corpus_smaller_than_a_global_batch_runs(tmp_path: Path, config: DataConfig) -> None:
    small = dataclasses.replace(
        config, path=str(write_jsonl(tmp_path / "s.jsonl", numbered(4))), prepared=str(tmp_path)
    )
    corpus = prepare(small, say=lambda line: None)
    assert LENGTH < corpus.train.tokens < 12 * LENGTH
    made = build_datasets([corpus], small, seed=1, train_samples=24, validation_samples=4)
    assert len(rows(list(train_batches(made, small, consumed_samples=0)))) == 24
    assert "longer than the corpus" in made.describe()[1]


def test_a_corpus_shorter_than_a_sample_is_refused(corpus: Corpus, config: DataConfig) -> None:
    tokens = corpus.train.tokens
    fits = dataclasses.replace(config, sequence_length=tokens - 1)
    build_datasets([corpus], fits, seed=1, train_samples=1, validation_samples=1)
    with pytest.raises(
        DataError, match=rf"{tokens} training tokens, .*data\.sequence_length={tokens} .*={tokens - 1} or less"
    ):
        build_datasets(
            [corpus], dataclasses.replace(config, sequence_length=tokens), seed=1, train_samples=1, validation_samples=1
        )


def test_a_global_batch_that_does_not_divide(datasets: Datasets, config: DataConfig) -> None:
    words = r"global_batch=12 is no multiple of data\.micro_batch=2 times 4 .* = 8\. Nearest that fit: 8 or 16"
    with pytest.raises(DataError, match=words):
        train_batches(datasets, config, consumed_samples=0, data_size=4)
    with pytest.raises(DataError, match="Nearest that fit: 16"):
        train_batches(datasets, config, consumed_samples=0, data_size=8)


def test_nothing_is_written_to_a_corpus(corpus: Corpus, config: DataConfig) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in [corpus.path, *corpus.path.rglob("*")]}
    made = build_datasets([corpus], config, seed=5, train_samples=12, validation_samples=4)
    list(train_batches(made, config, consumed_samples=0))
    assert {path.name: path.stat().st_mtime_ns for path in [corpus.path, *corpus.path.rglob("*")]} == before


def test_large_ids_come_back_whole(tmp_path: Path, config: DataConfig, large_vocabulary_file: Path) -> None:
    texts = [f"w{i} w{69_000 + i} w65536" for i in range(60)]
    large = dataclasses.replace(
        config,
        path=str(write_jsonl(tmp_path / "l.jsonl", texts)),
        prepared=str(tmp_path),
        tokenizer=str(large_vocabulary_file),
        sequence_length=4,
    )
    corpus = prepare(large, say=lambda line: None)
    made = build_datasets([corpus], large, seed=1, train_samples=corpus.train.documents - 1, validation_samples=1)
    seen = {token for row in rows(list(train_batches(made, large, consumed_samples=0))) for token in row}
    assert max(seen) == 69_999
    assert sum(token > 69_000 for token in seen) > 40


def test_batch_hash_is_of_content_and_order() -> None:
    one, two = torch.arange(8), torch.arange(8) + 1
    assert batch_hash([one, two]) == combine([sample_digest(one), sample_digest(two)])
    assert batch_hash(torch.stack([one, two])) == batch_hash([one.numpy(), two.to(torch.int32)])
    assert len(sample_digest(one)) == 16
    different = {batch_hash(s) for s in ([one, two], [two, one], [one], [torch.cat([one, two])])}
    assert len(different) == 4
    assert batch_hash([one, two]) == "d297d95f5f8e3b56"  # recorded in runs: must never change
