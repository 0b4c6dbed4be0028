"""Held out by content: stable for ever, about the share, and never nothing."""

from __future__ import annotations

import numpy as np
import pytest

from data.splitting import Encoded, Placed, Splitter, position
from tests.data.conftest import numbered


def encoded(text: str) -> Encoded:
    content = text.encode()
    return Encoded(np.frombuffer(content, np.uint8), len(content), position(content))


def split(texts: list[str], share: float) -> dict[str, list[str]]:
    splitter = Splitter(share)
    placed = [p for text in texts for p in splitter.add(encoded(text))]
    kept_back = splitter.rest()
    if kept_back is not None:
        assert kept_back.position == position(kept_back.ids.tobytes())
        placed.append(Placed("validation", kept_back.ids, kept_back.num_bytes))
    sides: dict[str, list[str]] = {"train": [], "validation": []}
    for one in placed:
        text = one.ids.tobytes().decode()
        assert one.num_bytes == len(text.encode())
        sides[one.split].append(text)
    return sides


def test_position_is_the_same_for_ever() -> None:
    # `printf hello | b2sum -l 64`, read as a big-endian share of 2^64
    assert position(b"hello") == pytest.approx(0.6551350150274587, abs=1e-15)
    assert position("ü".encode()) == pytest.approx(0.3357180333125356, abs=1e-15)


def test_share_is_kept_and_order_stays() -> None:
    texts = numbered(20_000, size=14)
    sides = split(texts, 0.02)
    assert 340 <= len(sides["validation"]) <= 460
    assert sorted(sides["train"] + sides["validation"]) == sorted(texts)
    assert sides["validation"] == [text for text in texts if position(text.encode()) < 0.02]


def test_what_stands_beside_a_document_does_not_matter() -> None:
    texts = numbered(2000)
    some = split(texts[::3], 0.1)["validation"]
    assert set(some) == set(split(texts[::-1], 0.1)["validation"]) & set(texts[::3])


def test_equal_documents_fall_to_one_side() -> None:
    sides = split(numbered(500) * 2, 0.1)
    assert not set(sides["train"]) & set(sides["validation"])


@pytest.mark.parametrize("share", [0.0, 1e-9])
def test_a_small_corpus_holds_out_the_smallest_hash(share: float) -> None:
    texts = numbered(7)
    for order in (texts, texts[::-1]):
        sides = split(order, share)
        assert sides["validation"] == [min(texts, key=lambda text: position(text.encode()))]
        assert sorted(sides["train"]) == sorted(set(texts) - set(sides["validation"]))


def test_one_document_is_held_out_and_nothing_is_left() -> None:
    assert split(["alone"], 0.0) == {"train": [], "validation": ["alone"]}
