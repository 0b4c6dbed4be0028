"""From parts to a corpus: binaries one behind another, the document held out if no other is, and the manifest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.config import DataConfig, DataError
from data.corpus import TRAIN, VALIDATION, Corpus, SourceInfo, SplitInfo
from data.parts import Part, PartInfo, check_bad
from data.sources import Source
from data.tokenizers import Ids, Tokenizer
from data.writing import id_dtype, join_binaries, write_index

SPLITS = (TRAIN, VALIDATION)


@dataclass(frozen=True)
class _Piece:
    """A stretch of a split: a part's file, or the one document that a part kept back."""

    file: Path
    lengths: npt.NDArray[np.int32]
    bytes: int


def merge(
    source: Source, parts: Sequence[Part], config: DataConfig, tokenizer: Tokenizer, folder: Path, building: Path
) -> Corpus:
    """Writes both splits into `building`; gives the corpus as it will stand in `folder`.

    Raises:
        DataError: a split without a document, or more bad documents than allowed over all parts.
    """
    infos = [part.info() for part in parts]
    bad = tuple(one for info in infos for one in info.bad)
    check_bad(bad, config.max_bad_documents)
    dtype = id_dtype(tokenizer.vocab_size)
    counts = np.sum([part.counts() for part in parts], axis=0)
    pieces = _pieces(parts, infos, building, tokenizer, dtype, counts)
    numbers = [sum(len(piece.lengths) for piece in pieces[split]) for split in SPLITS]
    empty = sum(info.empty for info in infos)
    _check_enough(source, config, numbers, empty, len(bad))
    written = [_write(pieces[split], building / split, dtype) for split in SPLITS]
    for split, row in zip(written, counts, strict=True):
        assert split.tokens == int(row.sum()), f"{split.tokens} tokens written, {row.sum()} counted"
    train, validation = written
    files = tuple(file for info in infos for file in info.files)
    vocabulary = [tokenizer.hash, tokenizer.vocab_size, tokenizer.eod, dtype.__name__]
    content = [[file.name, file.sha256] for file in files] or source.version
    return Corpus(
        path=folder,
        name=folder.name,
        hash=hash_json([train.sha256, validation.sha256, *vocabulary]),
        source=SourceInfo(
            kind=source.kind,
            path=str(source.root),
            text_field=config.text_field,
            hash=hash_json(content),
            files=files,
            ignored_files=source.ignored,
        ),
        tokenizer=tokenizer.name,
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        dtype=dtype.__name__,
        largest_id=int(np.flatnonzero(counts.sum(axis=0))[-1]),
        unigram_entropy=_entropy(counts[0]),
        validation_share=config.validation_share,
        train=train,
        validation=validation,
        empty=empty,
        bad=bad,
    )


def hash_json(value: object) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _pieces(
    parts: Sequence[Part],
    infos: Sequence[PartInfo],
    building: Path,
    tokenizer: Tokenizer,
    dtype: type[np.uint16] | type[np.int32],
    counts: npt.NDArray[np.int64],
) -> dict[str, list[_Piece]]:
    """Both splits in order. Documents kept back are trained on, but for the one of the smallest position where nothing
    else is held out; `counts` is told of them."""
    positions = [math.inf if info.candidate_position is None else info.candidate_position for info in infos]
    held_out = -1 if any(info.documents[1] for info in infos) else int(np.argmin(positions))
    found: dict[str, list[_Piece]] = {split: [] for split in SPLITS}
    for number, (part, info) in enumerate(zip(parts, infos, strict=True)):
        for split, size in zip(SPLITS, info.bytes, strict=True):
            found[split].append(_Piece(part.folder / f"{split}.bin", np.load(part.folder / f"{split}.npy"), size))
        if info.candidate_position is None:
            continue
        ids: Ids = np.append(part.candidate(), tokenizer.eod).astype(dtype)
        file = building / f".candidate-{number}"
        ids.tofile(file)
        row = int(number == held_out)
        counts[row] += np.bincount(ids, minlength=tokenizer.vocab_size)
        found[SPLITS[row]].append(_Piece(file, np.array([ids.size], dtype=np.int32), info.candidate_bytes))
    return found


def _write(pieces: Sequence[_Piece], prefix: Path, dtype: type[np.uint16] | type[np.int32]) -> SplitInfo:
    lengths = np.concatenate([piece.lengths for piece in pieces])
    tokens = int(lengths.sum(dtype=np.int64))
    data, index = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    with data.open("wb") as out:
        digest = join_binaries([piece.file for piece in pieces], out)
    write_index(index, lengths, dtype)
    size = data.stat().st_size
    assert size == tokens * np.dtype(dtype).itemsize, f"{size} bytes written for {tokens} tokens"
    num_bytes = sum(piece.bytes for piece in pieces)
    return SplitInfo(len(lengths), tokens, num_bytes, size, index.stat().st_size, digest)


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Of the frequencies of ids, in nats a token."""
    shares = counts[counts > 0] / counts.sum()
    return math.fsum(-shares * np.log(shares))


def _check_enough(source: Source, config: DataConfig, numbers: Sequence[int], empty: int, bad: int) -> None:
    """Raises DataError unless both splits have a document."""
    train, validation = numbers
    if train + validation == 0:
        raise DataError(
            f"data.path: {source.root} has no text: {empty} empty or white-space documents, {bad} unreadable ones. "
            "There is nothing to train on."
        )
    if train == 0 or validation == 0:
        raise DataError(
            f"data.path: {source.root} has {train + validation} usable document(s), of which {train} fall to training "
            f"and {validation} to validation; each needs one. Give more documents, or change data.validation_share "
            f"(now {config.validation_share})."
        )
