"""From documents to ids, batch by batch: what one process hands to another while a source is prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data.splitting import Encoded, position
from data.tokenizers import Ids, Tokenizer

BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 1024

Content = str | Ids  # a document's text, or its ids where they were made elsewhere
Batch = list[Content]


class EncodedBatch(NamedTuple):
    """Documents in their order: few arrays, which travel between processes faster than many.

    Attributes:
        ids: of all documents, one behind another.
        ends: [documents] where each ends in `ids`.
        num_bytes, positions: [documents], as in `Encoded`.
    """

    ids: Ids
    ends: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    positions: npt.NDArray[np.float64]

    def documents(self) -> Iterator[Encoded]:
        """One by one."""
        start = 0
        for end, num_bytes, place in zip(
            self.ends.tolist(), self.num_bytes.tolist(), self.positions.tolist(), strict=True
        ):
            yield Encoded(self.ids[start:end], num_bytes, place)
            start = end


Encode = Callable[[Iterable[Batch]], Iterator[EncodedBatch]]


def batched(contents: Iterable[Content]) -> Iterator[Batch]:
    """Batches of about BATCH_CHARACTERS characters or ids, and at most BATCH_DOCUMENTS documents."""
    batch: Batch = []
    size = 0
    for content in contents:
        batch.append(content)
        size += len(content)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def batch_size(batch: Batch) -> int:
    """Characters or ids in it."""
    return sum(len(content) for content in batch)


def encode_batch(tokenizer: Tokenizer, batch: Batch) -> EncodedBatch:
    """A batch as ids, document by document: the tokenizer's own threads are not used, there are processes instead."""
    documents = [_encode(tokenizer, content) for content in batch]
    return EncodedBatch(
        ids=np.concatenate([one.ids for one in documents]),
        ends=np.cumsum([one.ids.size for one in documents], dtype=np.int64),
        num_bytes=np.array([one.num_bytes for one in documents], dtype=np.int64),
        positions=np.array([one.position for one in documents], dtype=np.float64),
    )


def _encode(tokenizer: Tokenizer, content: Content) -> Encoded:
    if isinstance(content, str):
        ids, utf8 = tokenizer.encode(content), content.encode("utf-8")
    else:
        ids, utf8 = content, tokenizer.decode(content.tolist()).encode("utf-8")
    return Encoded(ids, len(utf8), position(utf8))
