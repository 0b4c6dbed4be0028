"""Each reader yields every good document once, in order, with its place; bad ones come out with place and reason."""

from __future__ import annotations

import gzip
import json
import socket
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data.readers
from data.config import DataError
from data.readers import CHUNK, BadDocument, Document, TokenDocument, cut, no_text, read_documents
from data.sources import find_source


def read(path: Path, field: str = "text") -> list[Document | BadDocument]:
    return list(read_documents(find_source(str(path)), field))


def write_parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=700)
    return path


# JSON lines


def test_jsonl_reads_only_the_text_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = ['{"text": "one", "n": 1}', "", '{"id": [2], "text": "2020-01-01"}', '  {"text": "a\\u2028b\\n"}\r']
    path.write_text("\n".join(lines), encoding="utf-8")
    assert read(path) == [
        Document("one", f"{path}:1"),
        Document("2020-01-01", f"{path}:3"),
        Document("a\u2028b\n", f"{path}:4"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut of', "not JSON: Unterminated string starting at column 10"),
        (b'{"text": null}', "field 'text' is a JSON null, not a string"),
        (b'{"text": 3.5}', "field 'text' is a JSON number, not a string"),
        (b'{"text": true}', "field 'text' is a JSON boolean, not a string"),
        (b'{"text": ["a"]}', "field 'text' is a JSON array, not a string"),
        (
            b'{"txt": "a", "id": 1}',
            "no field 'text' (fields there: 'txt', 'id'); data.text_field names the one to read",
        ),
        (b"{}", "no field 'text' (fields there: none); data.text_field names the one to read"),
        (b'"text"', "a JSON string where an object should be"),
        (b'{"text": "a\xff"}', "not UTF-8 at byte 11 of the line"),
        (b'{"text": "\\ud800"}', "field 'text' holds half a surrogate pair at character 0"),
    ],
)
def test_bad_json_line_is_named_and_the_others_survive(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    assert read(path) == [
        Document("before", f"{path}:1"),
        BadDocument(f"{path}:2", reason),
        Document("after", f"{path}:3"),
    ]


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"text": "a", "n": ' + b"9" * 10_000 + b"}"])
def test_json_that_breaks_the_parser_is_a_bad_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b'\n{"text": "after"}')
    bad, good = read(path)
    assert isinstance(bad, BadDocument)
    assert bad.reason.startswith("not JSON: ")
    assert good == Document("after", f"{path}:2")


def test_byte_order_mark_and_surrogate_pairs(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "\\ud83d\\ude00"}\n')
    assert read(path) == [Document("\N{GRINNING FACE}", f"{path}:1")]


GOOD = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).map(
    lambda text: (text, json.dumps({"n": 1, "text": text}).encode())
)
JUNK = (
    st.binary(max_size=30)
    .filter(lambda line: b"\n" not in line and line[:3] != BOM_UTF8)
    .map(lambda line: (None, line))
)


@settings(max_examples=200)
@given(lines=st.lists(st.one_of(GOOD, JUNK), min_size=1, max_size=8))
def test_no_good_line_is_lost_among_junk(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str | None, bytes]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(b"\n".join(line for _, line in lines) + b"\n")
    got = {document.origin: document for document in read_documents(find_source(str(path)), "text")}
    for number, (text, line) in enumerate(lines, start=1):
        origin = f"{path.absolute()}:{number}"
        if text is not None:
            assert got.pop(origin) == Document(text, origin)
        elif line.strip():
            assert isinstance(got.pop(origin), BadDocument)
    assert not got


# Text


def test_text_folder_one_document_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("eins\nzwei ü", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfdrei\r\n\r\nvier\r\n")
    (tmp_path / "c[1]*.txt").write_text("\n")
    assert read(tmp_path) == [
        Document("eins\nzwei ü", f"{tmp_path}/a.txt:1"),
        Document("drei\n\nvier\n", f"{tmp_path}/b.txt:1"),
        Document("\n", f"{tmp_path}/c[1]*.txt:1"),
    ]


def test_single_text_file_is_cut_so_that_a_part_can_be_held_out(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    text = "".join(f"line {i}\n" for i in range(1000))
    path.write_text(text)
    documents = read(path)
    assert 40 <= len(documents) <= 50
    assert "".join(one.text for one in documents if isinstance(one, Document)) == text
    second = documents[1]
    assert isinstance(second, Document)
    assert second.text.startswith(f"line {int(second.origin.rsplit(':')[-1]) - 1}\n")


def test_large_file_among_others_is_cut(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text("x")
    (tmp_path / "large.txt").write_text("0123456 \n" * 150_000)
    documents = read(tmp_path)
    sizes = [len(one.text) for one in documents if isinstance(one, Document)]
    assert sum(sizes) == 1_350_001
    assert sizes[-1] == 1
    assert all(65_536 <= size < 65_536 + 9 for size in sizes[:-2])


@settings(max_examples=100)
@given(text=st.text("ab \n", max_size=80), limit=st.integers(1, 20))
def test_cut_loses_nothing_and_counts_lines(text: str, limit: int) -> None:
    pieces = list(cut(text.splitlines(keepends=True), limit))
    assert "".join(piece for _, piece in pieces) == text
    assert all(piece for _, piece in pieces)
    done = ""
    for line, piece in pieces:
        assert line == done.count("\n") + 1
        done += piece


def test_cut_prefers_line_ends_and_spaces() -> None:
    assert list(cut(["aa\n", "bb\n", "cccc dd eeeeeee\n"], 5)) == [
        (1, "aa\nbb\n"),
        (3, "cccc "),
        (3, "dd "),
        (3, "eeeee"),
        (3, "ee\n"),
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", None),
        ("a" * (CHUNK - 1) + "ü", None),
        (b"abc\xff", "not UTF-8 at byte 3"),
        (b"abc\xc3", "not UTF-8 at byte 3"),
        (b"a" * (CHUNK - 1) + b"\xc3\xa4\xff", f"not UTF-8 at byte {CHUNK + 1}"),
        (b"a" * (CHUNK - 1) + b"\xc3a", f"not UTF-8 at byte {CHUNK - 1}"),
        ("text".encode("utf-16-le"), "no text (UTF-16?), as the NUL at byte 1 says"),
        ("text".encode("utf-16"), "not UTF-8 at byte 0"),
        (b"a\0b\xff", "no text (UTF-16?), as the NUL at byte 1 says"),
        (b"a" * (CHUNK - 1) + b"\xc3\xa4\0\xff", f"no text (UTF-16?), as the NUL at byte {CHUNK + 1} says"),
    ],
)
def test_what_is_no_text_and_where(tmp_path: Path, content: bytes | str, reason: str | None) -> None:
    path = tmp_path / "a"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert no_text(path) == reason


def test_text_that_is_not_utf8_is_one_bad_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"line\n" * 10 + b"caf\xe9\n")
    (tmp_path / "b.txt").write_text("good")
    bad, good = read(tmp_path)
    assert bad == BadDocument(
        f"{tmp_path}/a.txt", "not UTF-8 at byte 53; convert it (`iconv -f ENCODING -t UTF-8`) or leave it out"
    )
    assert good == Document("good", f"{tmp_path}/b.txt:1")


def test_nothing_asks_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    (tmp_path / "a.txt").write_text("x")
    assert len(read(tmp_path / "a.txt")) == 1
    assert len(read(write_parquet(tmp_path / "a.parquet", text=["x"]))) == 1


def test_unreadable_file_names_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}")

    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=rf"can't read {path}: Permission denied"):
        read(path)


# Parquet


def test_parquet_reads_one_column_in_order(tmp_path: Path) -> None:
    texts = [f"row {i} ü" for i in range(2000)]
    path = write_parquet(tmp_path / "a.parquet", n=list(range(2000)), body=texts)
    assert read(path, "body") == [Document(text, f"{path}:{i}") for i, text in enumerate(texts, start=1)]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_string_types_and_nulls(tmp_path: Path, kind: pa.DataType) -> None:
    cells = pa.array(["a", None, "b"]).cast(kind)
    path = write_parquet(tmp_path / "a.parquet", text=cells, other=cells)
    bad = BadDocument(f"{path}:2", "null in column 'text'")
    assert read(path) == [Document("a", f"{path}:1"), bad, Document("b", f"{path}:3")]


def test_parquet_without_the_column_names_those_there_are(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", content=["x"], id=[1])
    with pytest.raises(
        DataError, match=r"a\.parquet has no column 'text'; its columns are 'content', 'id'\. Set data\.text"
    ):
        read(path)
    with pytest.raises(DataError, match="column 'id' is of type int64, not string"):
        read(path, "id")


def test_corrupt_parquet_names_its_path(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [f"text {i}" * 20 for i in range(3000)]}), path, compression="none", use_dictionary=False
    )
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no parquet at all", whole[:1000] + bytes(400) + whole[1400:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{path}"):
            read(path)


def test_parquet_cell_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["first", "second", "third"]}), path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"second", b"sec\xffnd"))
    assert read(path)[1] == BadDocument(f"{path}:2", "not UTF-8 at byte 3 of column 'text'")


# Compressed JSON lines, large documents, and binaries of Megatron's


def compressed(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content[:20]) + gzip.compress(content[20:]))  # two members, as `cat` makes them
    else:
        half = pa.BufferOutputStream()
        with pa.CompressedOutputStream(half, "zstd") as stream:
            stream.write(content)
        path.write_bytes(half.getvalue().to_pybytes())
    return path


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_compressed_json_lines(tmp_path: Path, name: str) -> None:
    lines = b'\xef\xbb\xbf{"text": "one"}\n\nnothing\n{"text": "two"}'
    path = compressed(tmp_path / name, lines)
    assert read(path) == [
        Document("one", f"{path}:1"),
        BadDocument(f"{path}:3", "not JSON: Expecting value at column 1"),
        Document("two", f"{path}:4"),
    ]
    whole = path.read_bytes()
    for damaged in (whole[:-9], b"no such thing at all", whole[:10] + bytes(8) + whole[18:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"can't read {path}: .*\. Copy it again or leave it out"):
            read(path)


def test_a_line_or_cell_that_is_too_large_is_named_and_never_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.readers, "LARGEST_DOCUMENT", 100)
    path = tmp_path / "a.jsonl"
    for size in (80, 90, 5000):
        path.write_text(f'{{"text": "{"x" * size}"}}\n{{"text": "good"}}\n')
        first, second = read(path)
        whole = size + 13 <= 100
        assert first == Document("x" * 80, f"{path}:1") if whole else "the line is larger than" in first.reason
        assert second == Document("good", f"{path}:2")
    cells = write_parquet(tmp_path / "a.parquet", text=["x" * 101, "x" * 100])
    bad, good = read(cells)
    assert isinstance(bad, BadDocument)
    assert bad.reason.startswith("column 'text' is larger than")
    assert good == Document("x" * 100, f"{cells}:2")


def test_a_long_line_of_text_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.readers, "CHUNK", 7)
    path = tmp_path / "a.txt"
    text = "".join(f"line {i} ü\r\n" * (i % 3) for i in range(300)) + "x" * 200
    path.write_bytes(text.encode())
    documents = [one for one in read(path) if isinstance(one, Document)]
    wanted = text.replace("\r\n", "\n")
    assert "".join(one.text for one in documents) == wanted
    done = ""
    for one in documents:
        assert int(one.origin.rpartition(":")[2]) == done.count("\n") + 1
        done += one.text


@pytest.mark.filterwarnings(
    "error::pytest.PytestUnraisableExceptionWarning"
)  # nothing on the screen beside the message
@pytest.mark.parametrize("given", ["a.idx", "a.bin", "a", "."])
def test_binaries_of_megatron(tmp_path: Path, given: str) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    for sequences in ([[1, 2, 3], [4]], [[5]], [[]]):
        builder.add_document(np.concatenate(sequences), [len(sequence) for sequence in sequences])
    builder.finalize(str(tmp_path / "a.idx"))
    source = find_source(str(tmp_path / given))
    assert source.kind == "indexed"
    documents = list(read_documents(source, "text"))
    assert [one.ids.tolist() for one in documents if isinstance(one, TokenDocument)] == [[1, 2, 3, 4], [5], []]
    assert documents[1].origin == f"{tmp_path}/a.bin:2"
    (tmp_path / "a.bin").write_bytes(bytes(3))
    with pytest.raises(DataError, match=r"a\.bin has 3 bytes, which its index does not"):
        list(read_documents(find_source(str(tmp_path / given)), "text"))
    (tmp_path / "a.idx").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"a\.idx is no index of Megatron's"):
        list(read_documents(find_source(str(tmp_path / given)), "text"))
