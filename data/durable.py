"""Flushing to the disk: a rename must not outlive what it names. No torch here."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Makes a file, or a folder's list of files, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
