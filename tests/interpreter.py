"""Checks that run in Triton's interpreter: it must be chosen before Triton is imported, so in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def checked_in_interpreter(module: str, seconds: float = 300) -> str:
    """What `python -m module` prints there; fails where it fails."""
    command = [sys.executable, "-W", "ignore", "-m", module]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
