"""What text there is: the files of a source, found and listed once, before any of them is read.

A source is of one kind (`builtin`, `packages`, `text`, `jsonl`, `parquet`, `indexed`, `hub`), so one reader
(`data.readers`) reads all of its files. The list of files with their sizes and times of change is the source's
identity: the fast check by which a prepared corpus is reused.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from data.config import BUILTIN, PACKAGES, DataError
from data.hub import is_hub, parse_hub
from data.refusals import why

SUFFIXES: dict[str, tuple[str, ...]] = {
    "parquet": (".parquet",),
    "jsonl": tuple(name + end for name in (".jsonl", ".ndjson") for end in ("", ".gz", ".zst")),
    "indexed": (".bin",),
    "text": (".txt", ".text", ".md", ".rst", ".py"),
}
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4", ".7z", ".tar", ".tgz")
# Tests of the standard library are a third of its text and full of tables; site-packages are not part of it.
BUILTIN_LEAVES_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# What people write in packages: Python and what lies between it and C, C and CUDA, documentation. Larger files are
# mostly tables, and code that a program wrote.
PACKAGE_SUFFIXES = frozenset(
    {".py", ".pyi", ".pyx", ".pxd", ".pxi", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".cuh", ".md", ".rst", ".txt"}
)
LARGEST_PACKAGE_FILE = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when the source was listed. `name` is relative to the source's root, with forward slashes."""

    path: Path
    name: str
    size: int
    mtime_ns: int

    def sha256(self) -> str:
        """Hash of the content. Raises DataError if the file can't be read."""
        try:
            with self.path.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except FileNotFoundError as error:
            raise DataError(f"{self.path} is gone since it was listed. Prepare it once nothing changes it.") from error
        except OSError as error:
            raise _unreadable(self.path, error) from error


@dataclass(frozen=True)
class Source:
    """Files of one kind, in the order in which they are read (by name).

    Attributes:
        ignored: how many other files are beside them.
        version: of a data set of the hub, which has no files here: what changes when its content does.
    """

    kind: str
    name: str
    root: Path
    files: tuple[SourceFile, ...]
    ignored: int = 0
    version: str = ""

    @property
    def size(self) -> int:
        """Bytes in all files together."""
        return sum(file.size for file in self.files)

    @property
    def identity(self) -> str:
        """Hash of where the source is and of its files' names, sizes and times of change: cheap, no content is read."""
        listing = [[file.name, file.size, file.mtime_ns] for file in self.files]
        described = [self.kind, str(self.root), listing, *([self.version] if self.version else [])]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def check_unchanged(files: Iterable[SourceFile]) -> None:
    """Raises DataError if a file is no longer what it was when its source was listed."""
    for file in files:
        now = _stat(file.path)
        if (now.st_size, now.st_mtime_ns) != (file.size, file.mtime_ns):
            raise DataError(f"{file.path} was changed while it was being read. Prepare it once nothing writes to it.")


def check_readable(files: Iterable[SourceFile]) -> None:
    """Raises DataError for a file that this user may not read, before hours of work on those ahead of it."""
    for file in files:
        if not os.access(file.path, os.R_OK):
            try:
                file.path.open("rb").close()
            except PermissionError as error:
                raise _unreadable(file.path, error) from error


def find_source(path: str) -> Source:
    """Lists the source that `data.path` names, without reading it.

    Raises:
        DataError: no such path, unreadable, no usable file, more than one kind in a folder, or nothing but empty files.
    """
    if path == BUILTIN:
        return _builtin()
    if path == PACKAGES:
        return _packages()
    if is_hub(path):
        dataset = parse_hub(path)
        return Source("hub", dataset.name.replace("/", "_"), Path(path), (), version=dataset.version())
    root = _indexed(Path(path).expanduser().absolute())
    mode = _stat(root).st_mode
    if stat.S_ISDIR(mode):
        source = _folder(root)
    elif stat.S_ISREG(mode):
        source = Source(_kind_of_file(root), root.stem, root, (_file(root, root.parent),))
    else:
        raise DataError(
            f"data.path: {root} is neither a file nor a folder. Write the path of text, .jsonl or .parquet."
        )
    if source.size == 0:
        what = f"all {len(source.files)} files in {root} are" if stat.S_ISDIR(mode) else f"{root} is"
        raise DataError(f"data.path: {what} empty (0 bytes). There is nothing to train on.")
    return source


def _indexed(path: Path) -> Path:
    """The .bin file where a path is that of its .idx, or of both without their ends, as Megatron writes it."""
    if path.suffix == ".idx" and os.path.isfile(path):
        return path.with_suffix(".bin")
    return path.with_name(f"{path.name}.bin") if not os.path.exists(path) and os.path.isfile(f"{path}.idx") else path


def _builtin() -> Source:
    """The running Python's standard library, from where Python has it."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _walk(root, BUILTIN_LEAVES_OUT) if path.suffix == ".py"]
    if not paths:
        raise DataError(
            f"data.path: this Python has no source text of its standard library (looked for .py files in {root}), so "
            "the built-in corpus can't be made. Set data.path to text of your own."
        )
    return Source(BUILTIN, BUILTIN, root, _listed(paths, root))


def _packages() -> Source:
    """Source text and documentation of the Python packages that are installed for the running Python."""
    root = Path(sysconfig.get_path("purelib"))
    paths = _walk(root, {"__pycache__"}) if root.is_dir() else []
    files = _listed([path for path in paths if path.suffix in PACKAGE_SUFFIXES], root)
    kept = tuple(file for file in files if file.size <= LARGEST_PACKAGE_FILE)
    if not kept:
        raise DataError(f"data.path: no package in {root} has source text. Set data.path to text of your own.")
    return Source(PACKAGES, PACKAGES, root, kept, ignored=len(paths) - len(kept))


def _folder(root: Path) -> Source:
    """Every usable file under `root`, hidden ones left out."""
    paths = _walk(root)
    kinds = {kind: [p for p in paths if p.name.lower().endswith(ends)] for kind, ends in SUFFIXES.items()}
    kinds["indexed"] = [path for path in kinds["indexed"] if path.with_suffix(".idx").is_file()]
    if kinds["parquet"] and kinds["jsonl"]:
        raise DataError(
            f"data.path: {root} holds {len(kinds['parquet'])} Parquet and {len(kinds['jsonl'])} JSON lines files. A "
            "source is of one kind: give the sub-folder of one of them."
        )
    # Text beside data files is a README more often than a corpus: data files win, and the rest is counted as ignored.
    for kind, found in kinds.items():
        if found:
            return Source(kind, root.name, root, _listed(found, root), ignored=len(paths) - len(found))
    _refuse_folder(root, paths)


def _refuse_folder(root: Path, paths: list[Path]) -> NoReturn:
    wanted = " ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
    seen = Counter(path.suffix or "no suffix" for path in paths)
    there = ", ".join(f"{count} of {suffix}" for suffix, count in seen.most_common(5)) or "no files"
    raise DataError(f"data.path: {root} holds no file to read: wanted {wanted}, found {there}. {_way_out(seen)}")


def _way_out(suffixes: Iterable[str]) -> str:
    if any(suffix in COMPRESSED for suffix in suffixes):
        return "Of compressed files .jsonl.gz and .jsonl.zst are read: decompress others first."
    return "Give a text file (any name), .jsonl or .parquet, a folder of these, or `builtin`."


def _kind_of_file(path: Path) -> str:
    """Any name that is not a known other format is text."""
    suffix = path.suffix.lower()
    kind = next((kind for kind, ends in SUFFIXES.items() if path.name.lower().endswith(ends)), "text")
    if suffix in COMPRESSED and kind == "text":
        rename = (
            f", or if it holds JSON lines, name it .jsonl{suffix}" if f".jsonl{suffix}" in SUFFIXES["jsonl"] else ""
        )
        raise DataError(
            f"data.path: {path} is compressed. Decompress it first{rename}; .jsonl.gz, .jsonl.zst, .jsonl, .parquet "
            "and text are read as they are."
        )
    if kind == "indexed" and not path.with_suffix(".idx").is_file():
        raise DataError(f"data.path: {path} has no .idx file beside it. Megatron's indexed binaries are two files.")
    if suffix == ".json":
        raise DataError(
            f"data.path: {path} ends in .json. What is read is JSON lines, one object a line: convert it (for an "
            f"array, `jq -c '.[]' {path.name} > {path.stem}.jsonl`) or rename it to .jsonl if it already is that."
        )
    return kind


def _walk(root: Path, leave_out: Collection[str] = ()) -> list[Path]:
    """Files under `root`, but for hidden ones and folders named in `leave_out`; links to folders are not followed."""

    def refuse(error: OSError) -> NoReturn:
        reason = why(error, Path(error.filename))
        raise DataError(f"data.path: can't list {error.filename}: {reason}. Make it readable or leave it out.")

    found = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in leave_out]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return found


def _listed(paths: list[Path], root: Path) -> tuple[SourceFile, ...]:
    return tuple(sorted((_file(path, root) for path in paths), key=lambda file: file.name))


def _file(path: Path, root: Path) -> SourceFile:
    now = _stat(path)
    if not stat.S_ISREG(now.st_mode):  # to open a pipe would wait for who writes to it, for ever
        raise DataError(f"data.path: {path} is no regular file, but a pipe, socket or device. Leave it out.")
    return SourceFile(path, path.relative_to(root).as_posix(), now.st_size, now.st_mtime_ns)


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError as error:
        if path.is_symlink():
            raise DataError(
                f"data.path: {path} is a link to {os.readlink(path)}, which is not there. Mend it or leave it out."
            ) from error
        raise DataError(
            f"data.path: there is no {path}. Write the path of a text file, .jsonl, .parquet or a folder of them, or "
            "`builtin`."
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"data.path: can't read {path}: {why(error, path)}. Make it readable for this user.")
