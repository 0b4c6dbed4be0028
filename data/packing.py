"""Best-fit packing: whole documents into rows of one length, the largest first, each into the fullest that has room.

A document of n tokens, its end included, takes n - 1 places of a row: the end is a target, never an input. What is
longer than a row is cut into full rows and a rest. (Best-fit decreasing; for language models: "Fewer Truncations
Improve Language Modeling", arXiv 2404.10830.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """Pieces of documents in rows.

    Attributes:
        documents, offsets, sizes: of every piece, row by row: which document, its first token in there, its places.
        starts: [rows + 1], the first piece of each row.
        length: places of a row.
    """

    documents: Integers
    offsets: Integers
    sizes: Integers
    starts: Integers
    length: int

    @property
    def waste(self) -> float:
        """Share of the places that stay empty."""
        return 1 - float(self.sizes.sum()) / (self.length * (len(self.starts) - 1))


def pack(tokens: npt.NDArray[np.integer], length: int, seed: int) -> Packed:
    """Rows of one epoch, in random order.

    Args:
        tokens: of every document, its end included; 2 or more.
        length: places of a row.
        seed: below 2^32; of the order of rows and of which documents of one size meet in a row. The number of rows
            does not depend on it.
    """
    random = np.random.RandomState(seed)
    places = tokens.astype(np.int64) - 1
    assert places.min() > 0, "a document without a target"
    full, rest = np.divmod(places, length)
    whole = np.repeat(np.arange(len(places)), full)
    within = np.arange(len(whole)) - np.repeat(np.cumsum(full) - full, full)
    partial = random.permutation(np.flatnonzero(rest))
    documents = np.concatenate([whole, partial])
    offsets = np.concatenate([within, full[partial]]) * length
    sizes = np.concatenate([np.full(len(whole), length), rest[partial]])
    rows = np.concatenate([np.arange(len(whole)), len(whole) + best_fit(rest[partial], length)])
    rows = random.permutation(int(rows.max()) + 1)[rows]
    order = np.argsort(rows, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows))])
    return Packed(documents[order], offsets[order], sizes[order], starts, length)


def best_fit(sizes: Integers, length: int) -> Integers:
    """The row of each piece, rows counted from 0: best-fit decreasing, over all pieces of one size at once."""
    order = np.argsort(-sizes, kind="stable")
    ordered = sizes[order]
    bounds = [*np.flatnonzero(np.diff(ordered, prepend=-1)).tolist(), len(sizes)]
    rows = np.empty(len(sizes), dtype=np.int64)
    free = _Free()
    for at, stop in pairwise(bounds):
        size = int(ordered[at])
        while at < stop:
            room, candidates = free.take(size, stop - at, length)
            # The row that was just filled is the fullest one, so it takes all that fit before the next row takes any.
            each = room // size
            used = min(stop - at, each * len(candidates))
            complete, left = divmod(used, each)
            rows[order[at : at + used]] = np.repeat(candidates[: complete + 1], each)[:used]
            free.give(room - each * size, candidates[:complete])
            free.give(room - left * size, candidates[complete : complete + 1])
            free.give(room, candidates[complete + 1 :])
            at += used
    return rows


class _Free:
    """Rows by the room that they have left."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Integers]] = {}
        self._rooms: list[int] = []
        self._count = 0

    def take(self, size: int, pieces: int, length: int) -> tuple[int, Integers]:
        """All rows of the smallest room that holds `size`, or new ones for `pieces` pieces where there is none."""
        place = bisect_left(self._rooms, size)
        if place < len(self._rooms):
            room = self._rooms.pop(place)
            return room, np.concatenate(self._rows.pop(room))
        first = self._count
        self._count += -(-pieces // (length // size))
        return length, np.arange(first, self._count)

    def give(self, room: int, rows: Integers) -> None:
        """Rows that have `room` left."""
        if room and len(rows):
            if room not in self._rows:
                self._rows[room] = []
                insort(self._rooms, room)
            self._rows[room].append(rows)
