"""Which documents are held out: decided by the hash of a document's text, so by nothing else about the run.

The same text falls to the same side in every run, whatever the tokenizer and whatever stands beside it, and a document
that occurs twice is never on both sides. A small corpus may have no document under the share; then the one of the
smallest hash is held out: each part of a corpus keeps its own back, and they are compared when all are done.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from data.corpus import TRAIN, VALIDATION
from data.tokenizers import Ids


class Placed(NamedTuple):
    """A document that goes to `split`."""

    split: str
    ids: Ids
    num_bytes: int


class Encoded(NamedTuple):
    """A document's ids (without the end-of-document token), the UTF-8 bytes of its text, and its `position`."""

    ids: Ids
    num_bytes: int
    position: float


class Splitter:
    """Places a stream of documents. Until one falls under the share, that of the smallest hash is kept back."""

    def __init__(self, validation_share: float) -> None:
        self._share = validation_share
        self._has_validation = False
        self._candidate: Encoded | None = None  # of the smallest position, held out if no other is

    def add(self, new: Encoded) -> list[Placed]:
        """Where this document goes, and one kept back before if that is now decided; empty if this one is kept back."""
        if new.position < self._share:
            self._has_validation = True
            return [*self._release(TRAIN), Placed(VALIDATION, new.ids, new.num_bytes)]
        if self._has_validation:
            return [Placed(TRAIN, new.ids, new.num_bytes)]
        if self._candidate is not None and new.position >= self._candidate.position:
            return [Placed(TRAIN, new.ids, new.num_bytes)]
        released = self._release(TRAIN)
        self._candidate = new
        return released

    def rest(self) -> Encoded | None:
        """To be called after the last document: the one kept back, if any."""
        return self._candidate

    def _release(self, split: str) -> list[Placed]:
        candidate, self._candidate = self._candidate, None
        return [Placed(split, candidate.ids, candidate.num_bytes)] if candidate is not None else []


def position(content: bytes) -> float:
    """A number in [0, 1) that looks random and depends on `content` alone."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2.0**64
