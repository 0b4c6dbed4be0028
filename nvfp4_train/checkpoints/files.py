"""The files of a checkpoint folder: which are there, whether they are whole, how a new one takes its place. No torch.

checkpoints/
    latest                  name of the newest finished checkpoint; moves last
    step-00000100/
        checkpoint.json     what it is of: `Header`
        integrity.json      SHA-256 sums of all the other files
        metadata.json       Megatron's name of the format
        .metadata           torch's index of tensors: in which file, and where in it
        __3_0.distcp        tensors that rank 3 wrote
    step-00000200.3fa9.tmp/ one that is being written, or removed
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from data.durable import flush
from nvfp4_train.storage import FULL, write_atomic

FORMAT = 1
HEADER, LATEST, SUMS, INDEX = "checkpoint.json", "latest", "integrity.json", ".metadata"
PREFIX, TEMPORARY = "step-", ".tmp"
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
_READERS = 8  # files that are summed at a time


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, of another model, or can't be written: says which, and the way out."""


@dataclass(frozen=True)
class Header:
    """What a checkpoint says about itself in `checkpoint.json`.

    Attributes:
        step, samples, tokens: what the run had done and consumed, validation aside.
        skipped: how many of the last steps in a row were skipped.
        precision: name of the recipe in use.
        environment: device, compute capability, backend and versions, compared on load.
        world: ranks that wrote it.
        recipe: that recipe, key by key; None where only its name is known.
        data: hashes of the tokenizer and the corpora that it was trained on; None where they are unknown.
        format: of the whole folder.
    """

    step: int
    samples: int
    tokens: int
    skipped: int
    precision: str
    environment: dict[str, str]
    world: int
    recipe: dict[str, Any] | None = None
    data: dict[str, str] | None = None
    format: int = FORMAT


def step_folder(root: Path, step: int) -> Path:
    """`root/step-00000100`."""
    return root / f"{PREFIX}{step:08d}"


def temporary_folder(root: Path, step: int, token: str) -> Path:
    """Where the checkpoint of `step` is written before it is whole; `token` tells attempts apart."""
    final = step_folder(root, step)
    return final.with_name(f"{final.name}.{token}{TEMPORARY}")


def saved_steps(root: Path) -> list[int]:
    """Steps that have a folder under `root`, oldest first."""
    names = [path.name.removeprefix(PREFIX) for path in root.glob(f"{PREFIX}*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdigit())


def candidates(root: Path) -> list[Path]:
    """Checkpoints newest first, none newer than `latest`: what it does not name was never finished."""
    newest = latest(root)
    return [step_folder(root, step) for step in reversed(saved_steps(root)) if newest is None or step <= newest]


def latest(root: Path) -> int | None:
    """The step that `latest` names, None where it is missing or unreadable."""
    try:
        name = (root / LATEST).read_text().strip().removeprefix(PREFIX)
    except (OSError, UnicodeDecodeError):
        return None
    return int(name) if name.isdigit() else None


def newest_whole(root: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint under `root`, and what is wrong with each newer one; (None, []) where there is none.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    problems: list[str] = []
    for path in candidates(root):
        problem = damage(path)
        if problem is None:
            return path, problems
        problems.append(f"{path}: {problem}")
    if problems:
        raise CheckpointError(
            "no whole checkpoint is left: "
            + "; ".join(problems)
            + ". Restore a copy, or train again in another run_dir"
        )
    return None, []


def damage(path: Path) -> str | None:
    """What is wrong with the checkpoint at `path`, naming the file, or None where all is as it was written."""
    try:
        sums = json.loads((path / SUMS).read_text())["files"]
        for name in (HEADER, INDEX):
            if name not in sums:
                return f"{SUMS} does not list {name}"
        unlisted = sorted({entry.name for entry in path.iterdir()} - {*sums, SUMS})
        if unlisted:  # a loader could prefer it to what was saved
            return f"unlisted file {unlisted[0]}: {SUMS} does not know it"
        problem = _wrong_file(path, sums)
        if problem is not None:
            return problem
        with open(path / INDEX, "rb") as file:
            _IndexUnpickler(file).load()
        if step_folder(path.parent, step := read_header(path).step) != path:
            return f"{HEADER} is of step {step}: the folder was renamed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _wrong_file(path: Path, sums: dict[str, str]) -> str | None:
    """The first file under `path` whose SHA-256 sum is not that in `sums`, and what is known of it."""
    with ThreadPoolExecutor(_READERS) as pool:  # summing leaves the interpreter to the other threads
        found = list(pool.map(_sum, [path / name for name in sums]))
    for (name, expected), sum_found in zip(sums.items(), found, strict=True):
        if sum_found != expected:
            writer = _SHARD.fullmatch(name)
            by = "" if writer is None else f"; rank {writer[1]} wrote it"
            others = [other for other, its in sums.items() if its == sum_found]
            holds = f"; it holds what belongs into {others[0]}" if others else ""
            return f"{name} is damaged: its SHA-256 sum is not the one in {SUMS}{by}{holds}"
    return None


def size(path: Path) -> int:
    """Bytes of all files of the checkpoint at `path`."""
    return sum(file.stat().st_size for file in path.iterdir())


def read_header(path: Path) -> Header:
    """The header of the checkpoint at `path`.

    Raises:
        CheckpointError: it is of another format.
    """
    fields = json.loads((path / HEADER).read_text())
    if fields.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {fields.get('format')}, and this version reads format {FORMAT}: "
            "continue it with the version of nvfp4_train that wrote it"
        )
    return Header(**fields)


class _IndexUnpickler(pickle.Unpickler):
    """Reads torch's index and refuses every name but the records it is made of; torch may unpickle it afterwards."""

    _RECORDS: ClassVar = {
        "torch": {
            "Size",
            "float64",
            "float32",
            "bfloat16",
            "float16",
            "int64",
            "int32",
            "int16",
            "int8",
            "uint8",
            "bool",
        },
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.planner": {
            "BytesIOWriteData",
            "SavePlan",
            "TensorWriteData",
            "WriteItem",
            "WriteItemType",
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        if name in self._RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{INDEX} refers to {module}.{name}, which no checkpoint needs; it was not loaded")


def publish(temporary: Path, final: Path, header: Header, sums: Mapping[str, str]) -> None:
    """Make what was written in `temporary` the checkpoint `final`, and `latest` its name.

    Header, sums, flush, rename, `latest`: in this order, a crash at any point leaves the one before it in charge.

    Args:
        sums: of files that are flushed already, by those who wrote them; all others are summed and flushed here.

    Raises:
        CheckpointError: a file that another rank wrote is not seen here.
    """
    unseen = [name for name in sums if not (temporary / name).exists()]
    if unseen:
        raise CheckpointError(
            f"{temporary / unseen[0]}: was written, and the main rank does not see it. All nodes must share the file "
            "system of run_dir, mounted under the same path"
        )
    (temporary / HEADER).write_text(json.dumps(asdict(header), indent=1) + "\n")
    own = [file for file in sorted(temporary.iterdir()) if file.name not in sums]
    listed = dict(sorted({**sums, **{file.name: _sum(file) for file in own}}.items()))
    (temporary / SUMS).write_text(json.dumps({"algorithm": "sha256", "files": listed}, indent=1) + "\n")
    for file in (*own, temporary / SUMS, temporary):
        flush(file)
    if final.exists():  # a damaged one that the resumed run has come to again
        _remove(final)
    os.rename(temporary, final)
    flush(final.parent)
    write_atomic(final.with_name(LATEST), final.name + "\n")
    flush(final.parent)


def _sum(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remove(checkpoint: Path) -> None:
    """Under another name first: one whose removal is interrupted is no checkpoint any more."""
    gone = checkpoint.with_name(f"{checkpoint.name}.old{TEMPORARY}")
    os.rename(checkpoint, gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_temporary(root: Path) -> None:
    """Remove what a crash left under `root`, half written or half removed."""
    for left in root.glob(f"{PREFIX}*{TEMPORARY}"):
        shutil.rmtree(left, ignore_errors=True)


def drop_old(root: Path, keep: int, keep_every: int = 0, spared: Collection[Path] = ()) -> None:
    """Remove finished checkpoints but the newest `keep` (0: all), those of a multiple of `keep_every` (0: none) and
    the spared ones. What is newer than `latest` was passed over as damaged: it counts for nothing, and its step comes.
    """
    for checkpoint in candidates(root)[keep:] if keep > 0 else ():
        step = int(checkpoint.name.removeprefix(PREFIX))
        if checkpoint not in spared and not (keep_every and step % keep_every == 0):
            _remove(checkpoint)


def check_room(root: Path, needed: int) -> None:
    """Raise CheckpointError where fewer than `needed` bytes are free under `root`."""
    free = shutil.disk_usage(root).free
    if free < needed:
        raise no_room(root, needed, free)


def no_room(root: Path, needed: int, free: int) -> CheckpointError:
    """The error of a full disk: path, needed and free bytes, and what to do."""
    return CheckpointError(
        f"no room for a checkpoint in {root}: {needed:,} bytes are needed and {free:,} are free. The checkpoints "
        "before it are whole. Free some space, keep fewer (checkpoint.keep) or save less often (checkpoint.every). "
        "Then run the same command again"
    )


def out_of_space(error: BaseException | None) -> bool:
    """True where `error`, or what caused it, is the system's 'no space left' or 'quota exceeded'."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__ or error.__context__
    return False
