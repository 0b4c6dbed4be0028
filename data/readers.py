"""From files to documents: one reader a kind of source, all of one shape.

A reader takes a source and one of its files and yields documents in order, each with the place it came from
(`path:line`, or `path:row`); what can't be read as a document comes out as a `BadDocument` with the reason, so that
whoever prepares decides whether to stop. Nothing is held but the document at hand.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import tempfile
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from data.config import DataError
from data.hub import parse_hub
from data.quiet import heard, quiet
from data.refusals import why
from data.sources import Source, SourceFile

CHUNK = 1 << 20
# A JSON line, Parquet cell or row of the hub above this is refused by name.
LARGEST_DOCUMENT = 1 << 26
BATCH_BYTES = 1 << 26  # of Parquet rows at once, by the mean of the file
# A text file above this is cut at line ends into documents of about DOCUMENT_BYTES, so that memory stays bounded and a
# part can be held out. A source of one file is always cut, into this many documents if it is small.
WHOLE_FILE_BYTES = 1 << 20
DOCUMENT_BYTES = 1 << 16
DOCUMENTS_OF_ONE_FILE = 50
ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class Document:
    """Text that belongs together, and where it came from."""

    text: str
    origin: str


@dataclass(frozen=True)
class TokenDocument:
    """Token ids that belong together, made elsewhere, and where they came from."""

    ids: npt.NDArray[np.integer[Any]]
    origin: str


@dataclass(frozen=True)
class BadDocument:
    """A place where a document should be and can't be read, and why."""

    origin: str
    reason: str


AnyDocument = Document | TokenDocument | BadDocument
Reader = Callable[[Source, SourceFile, str], Iterator[AnyDocument]]


def read_documents(
    source: Source, text_field: str, files: Sequence[SourceFile] | None = None, stream: bool = True
) -> Iterator[AnyDocument]:
    """Documents of a source in order; the same at every call while its files do not change.

    Args:
        files: some of the source's; None: all.
        stream: whether a data set of the hub is read as it comes or downloaded first.

    Raises:
        DataError: a file can't be opened, is not of its kind, or has no column `text_field`.
    """
    if source.kind == "hub":
        yield from _read_hub(source, text_field, stream)
        return
    read = READERS[source.kind]
    for file in source.files if files is None else files:
        try:
            yield from read(source, file, text_field)
        except (OSError, EOFError, zlib.error) as error:
            reason = why(error, file.path) if isinstance(error, OSError) else str(error).rstrip(".")
            raise DataError(f"can't read {file.path}: {reason}. Copy it again or leave it out.") from error


def _read_hub(source: Source, text_field: str, stream: bool) -> Iterator[AnyDocument]:
    """A document a row of a data set of the hub. Rows count from 1."""
    dataset = parse_hub(str(source.root))
    for row, text in enumerate(dataset.rows(text_field, stream), start=1):
        yield _checked(text, f"{dataset}:{row}", f"column {text_field!r}")


def read_python(source: Source, file: SourceFile, text_field: str) -> Iterator[AnyDocument]:
    """A Python module is a document, decoded as its own coding line says."""
    try:
        with tokenize.open(file.path) as stream:
            yield Document(stream.read(), str(file.path))
    except (SyntaxError, UnicodeDecodeError) as error:
        yield BadDocument(str(file.path), f"not text in the encoding it states ({error})")


def read_package(source: Source, file: SourceFile, text_field: str) -> Iterator[AnyDocument]:
    """A file of an installed package is a document."""
    read = read_python if file.path.suffix == ".py" else read_text
    return read(source, file, text_field)


def read_text(source: Source, file: SourceFile, text_field: str) -> Iterator[AnyDocument]:
    """A UTF-8 file: one document, or several cut at line ends. Line ends become \\n."""
    reason = no_text(file.path)
    if reason is not None:
        yield BadDocument(str(file.path), f"{reason}; convert it (`iconv -f ENCODING -t UTF-8`) or leave it out")
        return
    limit = _document_bytes(source, file)
    with file.path.open(encoding="utf-8-sig") as stream:
        for first_line, text in cut(iter(lambda: stream.readline(CHUNK), ""), limit):
            yield Document(text, f"{file.path}:{first_line}")


def read_jsonl(source: Source, file: SourceFile, text_field: str) -> Iterator[AnyDocument]:
    """One JSON object a line, of which only `text_field` is used; blank lines are no documents."""
    with _decompressed(file.path) as stream:
        for number, line in enumerate(_bounded_lines(stream), start=1):
            origin = f"{file.path}:{number}"
            if line is None:
                yield BadDocument(origin, _TOO_LARGE.format("the line is"))
                continue
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield _json_document(line, text_field, origin)


def _decompressed(path: Path) -> BinaryIO:
    """The bytes of a file that may be compressed."""
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix.lower() == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"), CHUNK)
    return path.open("rb")


def _bounded_lines(stream: BinaryIO) -> Iterator[bytes | None]:
    """Lines with their ends; None for one above LARGEST_DOCUMENT, which is never held."""
    while line := stream.readline(LARGEST_DOCUMENT + 1):
        if len(line) <= LARGEST_DOCUMENT:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(CHUNK)
        yield None


def read_parquet(source: Source, file: SourceFile, text_field: str) -> Iterator[AnyDocument]:
    """One document a row through `datasets`, of the column `text_field` alone. Rows count from 1."""
    from datasets import Features, Value

    rows = _check_column(file.path, text_field)
    options = {
        "columns": [text_field],
        "features": Features({text_field: Value("large_string")}),
        "batch_size": rows,
    }
    row = 0
    for batch in _batches("parquet", file.path, rows, **options):
        for cell in batch[text_field]:
            row += 1
            origin = f"{file.path}:{row}"
            try:
                text = cell.as_py()
            except UnicodeDecodeError as error:
                yield BadDocument(origin, f"not UTF-8 at byte {error.start} of column {text_field!r}")
                continue
            yield _checked(text, origin, f"column {text_field!r}")


def read_indexed(source: Source, file: SourceFile, text_field: str) -> Iterator[AnyDocument]:
    """The documents of Megatron's indexed binaries, as the ids that are stored. Documents count from 1."""
    with quiet():
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        try:
            stored = IndexedDataset.__new__(IndexedDataset)
            stored.bin_reader = stored.index = None  # its destructor would miss them where the next line fails
            stored.__init__(str(file.path.with_suffix("")))
        except (AssertionError, ValueError, KeyError) as error:
            index = file.path.with_suffix(".idx")
            raise DataError(f"{index} is no index of Megatron's ({error}). Copy both files again.") from error
    bounds = stored.document_indices.tolist()
    if file.size != int(stored.sequence_lengths.sum(dtype=np.int64)) * np.dtype(stored.index.dtype).itemsize:
        raise DataError(f"{file.path} has {file.size} bytes, which its index does not. Copy both files again.")
    for number, (first, last) in enumerate(pairwise(bounds), start=1):
        pieces = [stored[i] for i in range(first, last)]
        yield TokenDocument(np.concatenate(pieces) if pieces else np.empty(0, np.int32), f"{file.path}:{number}")


READERS: dict[str, Reader] = {
    "builtin": read_python,
    "packages": read_package,
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "indexed": read_indexed,
}
_TOO_LARGE = f"{{}} larger than {LARGEST_DOCUMENT >> 20} MiB, the most that one document may have; cut it up"


def _checked(text: object, origin: str, place: str) -> Document | BadDocument:
    """A cell as a document, where it is text of a size that can be handled."""
    if not isinstance(text, str):
        return BadDocument(origin, f"null in {place}" if text is None else f"{place} holds no string")
    if len(text) > LARGEST_DOCUMENT:
        return BadDocument(origin, _TOO_LARGE.format(f"{place} is"))
    return Document(text, origin)


def cut(lines: Iterable[str], limit: int) -> Iterator[tuple[int, str]]:
    """Joins lines (with their ends) into pieces of at least `limit` characters, each with the number of its first line.

    A long line may come in parts, of which the last has the end. A line longer than `limit` is cut too, after a space
    where there is one. Joined again, the pieces are the text.
    """
    piece: list[str] = []
    size, first, number, whole = 0, 1, 0, True
    for line in lines:
        number += whole
        whole = line.endswith("\n")
        if not piece:
            first = number
        start = 0
        while len(line) - start > limit:
            end = line.rfind(" ", start, start + limit) + 1 or start + limit
            yield first, "".join([*piece, line[start:end]])
            piece, size, first, start = [], 0, number, end
        piece.append(line[start:])
        size += len(line) - start
        if size >= limit:
            yield first, "".join(piece)
            piece, size = [], 0
    if size:
        yield first, "".join(piece)


def no_text(path: Path) -> str | None:
    """Why a file is no UTF-8 text and at which byte, or None; reads in chunks.

    A NUL is UTF-8, but no text has one: UTF-16 of Latin letters has one beside each, and would double the tokens.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    fed = 0
    with path.open("rb") as stream:
        while True:
            chunk = stream.read(CHUNK)
            pending = len(decoder.getstate()[0])  # bytes of a character that the last chunk cut in two
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                if b"\0" not in chunk[: max(0, error.start - pending)]:
                    return f"not UTF-8 at byte {fed - pending + error.start}"
            if b"\0" in chunk:
                return f"no text (UTF-16?), as the NUL at byte {fed + chunk.index(0)} says"
            if not chunk:
                return None
            fed += len(chunk)


def _document_bytes(source: Source, file: SourceFile) -> int:
    """The size of document that a text file is cut into; its own size where it stays whole."""
    if len(source.files) == 1:
        return max(1, min(DOCUMENT_BYTES, file.size // DOCUMENTS_OF_ONE_FILE))
    return DOCUMENT_BYTES if file.size > WHOLE_FILE_BYTES else max(1, file.size)


def _json_document(line: bytes, text_field: str, origin: str) -> Document | BadDocument:
    try:
        record = json.loads(line.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadDocument(origin, f"not UTF-8 at byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return BadDocument(origin, f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return BadDocument(origin, f"not JSON: {error}")
    if not isinstance(record, dict):
        return BadDocument(origin, f"a JSON {_json_type(record)} where an object should be")
    if text_field not in record:
        there = ", ".join(repr(key) for key in list(record)[:8]) or "none"
        return BadDocument(
            origin, f"no field {text_field!r} (fields there: {there}); data.text_field names the one to read"
        )
    text = record[text_field]
    if not isinstance(text, str):
        return BadDocument(origin, f"field {text_field!r} is a JSON {_json_type(text)}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return BadDocument(origin, f"field {text_field!r} holds half a surrogate pair at character {error.start}")
    return Document(text, origin)


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _check_column(path: Path, column: str) -> int:
    """Rows to read at once; DataError if the file is no Parquet or its column `column` is missing or not of strings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, ValueError) as error:
        reason = str(error).rstrip(".")
        raise DataError(f"{path} is not a whole Parquet file: {reason}. Copy it again or leave it out.") from error
    if column not in schema.names:
        raise DataError(
            f"{path} has no column {column!r}; its columns are {', '.join(map(repr, schema.names))}. Set "
            "data.text_field to the one that holds the text."
        )
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DataError(
            f"{path}: column {column!r} is of type {kind}, not string. Set data.text_field to a column of strings."
        )
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    largest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    return max(1, min(ROWS_AT_ONCE, BATCH_BYTES // max(1, largest)))


def _batches(builder: str, path: Path, rows: int, **options: Any) -> Iterator[Any]:
    """Arrow tables of `rows` rows of one local file, streamed by Hugging Face `datasets`."""
    import datasets

    if "::" in str(path):  # read as a chain of addresses there
        raise DataError(f"{path}: a name with '::' can't be opened by `datasets`. Rename it.")
    # Neither the user's cache nor the network is touched: the file is local and streaming keeps nothing.
    with heard("datasets"), tempfile.TemporaryDirectory() as cache:
        try:
            stream = datasets.load_dataset(
                builder, data_files=glob.escape(str(path)), split="train", streaming=True, cache_dir=cache, **options
            )
            yield from stream.with_format("arrow").iter(batch_size=rows)
        except (DataError, OSError, MemoryError):
            raise
        except Exception as error:  # datasets raises what its readers and its own wrappers raise: no common class
            raise DataError(f"can't read {path} as {builder}: {error}. Copy it again or leave it out.") from error
