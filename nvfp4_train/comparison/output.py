"""The files of a comparison, written together, over nothing but an earlier comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from nvfp4_train.comparison.runs import METRICS, CompareError

RESULT = "compare.json"
FILES = (RESULT, "loss.png", "gap.png", "report.html")


def check_folder(folder: Path) -> None:
    """Raises CompareError where `folder` is a file or a run folder, or holds files of these names that no comparison
    wrote.
    """
    if folder.exists() and not folder.is_dir():
        raise CompareError(f"--out {folder}: is a file; name a folder.")
    if (folder / METRICS).exists():
        raise CompareError(
            f"--out {folder}: is a run folder, it holds {METRICS}; a comparison is of several runs and belongs into a "
            f"folder of its own. Name another one, for example {folder / 'comparison'}."
        )
    there = [name for name in FILES if (folder / name).exists()]
    if there and not _ours(folder / RESULT):
        raise CompareError(
            f"--out {folder}: holds {', '.join(there)} that no comparison of runs wrote. Nothing there is overwritten: "
            "name another folder."
        )


def _ours(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"baseline", "runs"} <= content.keys()


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all `files` (name to content) into `folder`: under other names first, then moved in, `compare.json` first
    of all.

    A reader never sees half a file, and a folder with pictures always has the `compare.json` that marks them as ours.
    Raises CompareError where the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = {name: folder / f".{name}.{os.getpid()}" for name in files}
        try:
            for name, content in files.items():
                temporary[name].write_bytes(content)
            for name in sorted(files, key=lambda name: name != RESULT):
                os.replace(temporary[name], folder / name)
        finally:
            for path in temporary.values():
                path.unlink(missing_ok=True)
    except OSError as error:
        raise CompareError(f"--out {folder}: can't be written ({error.strerror}). Name another folder.") from None
