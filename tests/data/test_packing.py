"""Rows of whole documents: every token but a document's first is a target once, and nothing else is."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import DataConfig
from data.corpus import Corpus
from data.loading import Datasets, build_datasets, train_batches, validation_batches
from data.packing import best_fit, pack
from data.prepare import prepare
from tests.data.conftest import numbered, write_jsonl
from tests.data.test_loading import stored

LENGTH = 32


def one_by_one(sizes: list[int], length: int) -> list[int]:
    """Best-fit decreasing as it is written in textbooks: rows' contents, as how full each is, sorted."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= size
        else:
            rooms.append(length - size)
    return sorted(length - room for room in rooms)


@settings(max_examples=200)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=60), length=st.integers(20, 40))
def test_best_fit_is_that_of_the_textbook(sizes: list[int], length: int) -> None:
    rows = best_fit(np.array(sizes), length)
    filled = np.bincount(rows, weights=sizes).astype(int).tolist()
    assert sorted(filled) == one_by_one(sizes, length)


@settings(max_examples=100)
@given(tokens=st.lists(st.integers(2, 70), min_size=1, max_size=40), length=st.integers(2, 30), seed=st.integers(0, 9))
def test_every_place_of_every_document_is_in_one_row(tokens: list[int], length: int, seed: int) -> None:
    packed = pack(np.array(tokens, dtype=np.int32), length, seed)
    assert packed.starts[-1] == len(packed.sizes)
    for start, stop in zip(packed.starts[:-1], packed.starts[1:], strict=True):
        assert 0 < packed.sizes[start:stop].sum() <= length
    places = Counter(
        (document, offset + i)
        for document, offset, size in zip(packed.documents.tolist(), packed.offsets, packed.sizes, strict=True)
        for i in range(size)
    )
    assert places == Counter((document, i) for document, count in enumerate(tokens) for i in range(count - 1))
    assert packed.waste == pytest.approx(1 - (sum(tokens) - len(tokens)) / length / (len(packed.starts) - 1))
    assert len(pack(np.array(tokens, dtype=np.int32), length, seed + 1).starts) == len(packed.starts)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = tmp_path_factory.mktemp("packing")
    texts = ["a", "b" * (LENGTH - 1), "c" * (3 * LENGTH), "d" * LENGTH, *numbered(60, 11), *numbered(60, 71)]
    return DataConfig(
        path=str(write_jsonl(folder / "a.jsonl", texts)),
        prepared=str(folder / "prepared"),
        sequence_length=LENGTH,
        global_batch=4,
        micro_batch=2,
        validation_share=0.1,
    )


@pytest.fixture(scope="module")
def corpus(config: DataConfig) -> Corpus:
    return prepare(config, say=lambda line: None)


def opened(corpus: Corpus, config: DataConfig, packing: str, seed: int = 1) -> tuple[Datasets, DataConfig]:
    chosen = dataclasses.replace(config, packing=packing)
    return build_datasets([corpus], chosen, seed=seed, train_samples=400, validation_samples=1000), chosen


def targets(rows: list[dict[str, np.ndarray]]) -> Counter[tuple[int, ...]]:
    """The documents of all rows as the model sees them: inputs and, at the places that count, targets."""
    seen: Counter[tuple[int, ...]] = Counter()
    for row in rows:
        for document in np.unique(row["documents"]):
            here = row["documents"] == document
            assert len(np.unique(row["loss_mask"][here][:-1])) <= 1 or 256 in row["tokens"][here]
            seen.update(row["labels"][here & (row["loss_mask"] == 1)].tolist())
    return seen


@pytest.mark.parametrize("split", ["train", "validation"])
def test_best_fit_rows_hold_each_document_once(corpus: Corpus, config: DataConfig, split: str) -> None:
    datasets, _ = opened(corpus, config, "best_fit")
    samples = getattr(datasets.sources[0], split)
    rows = [samples.row(i) for i in range(samples.per_epoch)]
    wanted: Counter[int] = Counter(token for document in stored(corpus, split) for token in document[1:])
    assert targets(rows) == wanted  # the ends of documents are among them, padding is not
    documents = Counter(tuple(document) for document in stored(corpus, split) if len(document) <= LENGTH + 1)
    found: Counter[tuple[int, ...]] = Counter()
    for row in rows:
        assert (np.diff(row["documents"]) >= 0).all()
        for number in np.unique(row["documents"]):
            here = (row["documents"] == number) & (row["loss_mask"] == 1)
            if here.any():
                assert row["tokens"][here][1:].tolist() == row["labels"][here][:-1].tolist()
                found[*row["tokens"][here].tolist(), int(row["labels"][here][-1])] += 1
    assert documents <= found
    padding = [row for row in rows if (row["loss_mask"] == 0).any()]
    for row in padding:
        empty = row["loss_mask"] == 0
        assert not (np.isin(row["documents"][~empty], row["documents"][empty])).any()


def test_best_fit_epochs_differ_and_do_not_hang_on_anything_else(corpus: Corpus, config: DataConfig) -> None:
    one, again = (opened(corpus, config, "best_fit")[0] for _ in range(2))
    epoch = one.sources[0].train.per_epoch
    first, second = ([one[i]["tokens"].tolist() for i in range(n, n + epoch)] for n in (0, epoch))
    assert first != second
    # the second epoch without the first
    assert [again[i]["tokens"].tolist() for i in range(epoch, 2 * epoch)] == second
    assert [opened(corpus, config, "best_fit", seed=2)[0][i]["tokens"].tolist() for i in range(epoch)] != first
    assert f"best fit leaves {one.sources[0].train.waste():.2%} of the places empty" in "".join(one.describe())


def test_borders_of_joined_rows_are_the_ends_of_documents(corpus: Corpus, config: DataConfig) -> None:
    apart, chosen = opened(corpus, config, "documents")
    joined, _ = opened(corpus, config, "concatenate")
    for i in range(apart.sources[0].train.per_epoch):
        row, plain = apart[i], joined[i]
        assert row["tokens"].tolist() == plain["tokens"].tolist()
        assert row["labels"].tolist() == plain["labels"].tolist()
        assert "documents" not in plain
        number = 0
        for place, token in enumerate(row["tokens"].tolist()):
            assert row["documents"][place] == number
            assert row["loss_mask"][place] == (token != 256)  # the next document's first token is foretold by nothing
            number += token == 256
        assert (row["loss_mask"][row["labels"] == 256] == 1).all()  # an end is a target
    batch = next(iter(train_batches(apart, chosen, consumed_samples=0)))
    assert {name: str(t.dtype) for name, t in batch.items()} == {
        "tokens": "torch.int64",
        "labels": "torch.int64",
        "loss_mask": "torch.float32",
        "documents": "torch.int32",
    }


def test_an_end_that_is_the_padding_counts_as_a_target(corpus: Corpus, config: DataConfig) -> None:
    """Best fit pads with the end-of-document id: as padding it is masked, as an end it is not."""
    datasets, chosen = opened(corpus, config, "best_fit")
    ends = padded = 0
    for batch in validation_batches(datasets.sources[0], chosen):
        ends += int(((batch["labels"] == corpus.eod) & (batch["loss_mask"] == 1)).sum())
        padded += int(((batch["labels"] == corpus.eod) & (batch["loss_mask"] == 0)).sum())
    assert ends == corpus.validation.documents
    assert padded > 0
