"""AdamW's kernel without a GPU: Triton's interpreter runs it in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_kernel_equals_torchs_adamw() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.fused_adam_checks"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "equal\n"
