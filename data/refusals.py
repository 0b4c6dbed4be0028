"""Why the system refused a file, in words that say whose it is. No torch here."""

from __future__ import annotations

import os
import pwd
from pathlib import Path


def why(error: OSError, path: Path) -> str:
    """The system's reason; where it is a permission, also what forbids it: the file, or a folder on its way."""
    reason = error.strerror or str(error).rstrip(".")
    return f"{reason} ({_belonging(path)})" if isinstance(error, PermissionError) else reason


def _belonging(path: Path) -> str:
    closed = path
    while not os.path.lexists(closed):  # not there yet, or out of sight: the folder that it is in refuses
        closed = closed.parent
    status = closed.stat()
    owner, user = _user(status.st_uid), _user(os.geteuid())
    return f"{closed} belongs to {owner}, mode {status.st_mode & 0o7777:03o}, and this is {user}"


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:  # as in many a container
        return f"user {number}"
