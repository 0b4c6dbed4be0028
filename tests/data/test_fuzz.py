"""Thrown bytes at the readers: never a traceback, never a good document lost. Hundreds of inputs; ten thousand with

python -m pytest tests/data/test_fuzz.py --fuzz 10000
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.config import DataError
from data.readers import BadDocument, Document, TokenDocument, read_documents
from data.sources import find_source

ALPHABET = [*map(chr, range(0x20, 0x7F)), "\n", "\t", "\x00", "ü", "\u2028", "\N{GRINNING FACE}", '"', "\\", "{", "}"]


@pytest.fixture
def draws(pytestconfig: pytest.Config) -> Iterator[random.Random]:
    """A generator of its own for each input."""
    return (random.Random(seed) for seed in range(pytestconfig.getoption("--fuzz")))


def some_text(draw: random.Random) -> str:
    return "".join(draw.choices(ALPHABET, k=draw.randrange(1, 60)))


def damaged(draw: random.Random, content: bytes) -> bytes:
    """Bytes changed, cut out, put in, doubled or cut off."""
    bytes_ = bytearray(content)
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(bytes_) + 1)
        kind = draw.randrange(5)
        if kind == 0 and at < len(bytes_):
            bytes_[at] = draw.randrange(256)
        elif kind == 1:
            del bytes_[at : at + draw.randrange(40)]
        elif kind == 2:
            bytes_[at:at] = draw.randbytes(draw.randrange(20))
        elif kind == 3:
            bytes_[at:at] = bytes_[at : at + draw.randrange(40)]
        else:
            del bytes_[at:]
    return bytes(bytes_)


def read(path: Path) -> list[Document | TokenDocument | BadDocument]:
    """What comes out before the reader ends or refuses the file in our words, naming it."""
    found = []
    try:
        for document in read_documents(find_source(str(path)), "text"):
            assert document.origin.startswith(str(path))
            found.append(document)
    except DataError as error:
        if str(path) not in str(error):
            raise
    return found


def test_lines_between_thrown_bytes_are_never_lost(tmp_path: Path, draws: Iterator[random.Random]) -> None:
    for draw in draws:
        path = tmp_path / draw.choice(["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
        lines: list[tuple[str | None, bytes]] = []
        for _ in range(draw.randrange(1, 8)):
            text = some_text(draw)
            good = json.dumps({"n": draw.random(), "text": text}, ensure_ascii=draw.random() < 0.5).encode()
            thrown = draw.choice([draw.randbytes(draw.randrange(30)), damaged(draw, good)]).replace(b"\n", b" ")
            lines.append((text, good) if draw.random() < 0.5 else (None, thrown))
        content = b"\n".join(line for _, line in lines) + draw.choice([b"", b"\n"])
        if path.suffix == ".gz":
            content = gzip.compress(content, 1)
        elif path.suffix == ".zst":
            content = pa.Codec("zstd").compress(content, asbytes=True)
        path.write_bytes(content)
        got = {document.origin: document for document in read(path)}
        for number, (text, _) in enumerate(lines, 1):
            if text is not None:
                assert got[f"{path}:{number}"] == Document(text, f"{path}:{number}")


def test_damaged_files_are_read_or_refused_by_name(tmp_path: Path, draws: Iterator[random.Random]) -> None:
    texts = [f"document {i} " * 9 for i in range(40)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    pq.write_table(pa.table({"text": texts, "n": range(40)}), tmp_path / "whole", row_group_size=15, compression="none")
    whole = {
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines),
        "a.jsonl.zst": pa.Codec("zstd").compress(lines, asbytes=True),
        "a.parquet": (tmp_path / "whole").read_bytes(),
        "a.txt": lines,
    }
    for draw in draws:
        name = draw.choice(list(whole))
        path = tmp_path / name
        path.write_bytes(damaged(draw, whole[name]) or b"x")
        for document in read(path):
            if isinstance(document, Document):
                document.text.encode("utf-8")  # what comes out as text is text
