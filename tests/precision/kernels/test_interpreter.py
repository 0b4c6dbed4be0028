"""The kernels without a GPU: Triton's interpreter runs them in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("checks", ["checks", "fp8_checks", "native_checks"])
def test_kernels_have_the_bits_of_the_reference(checks: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", f"tests.precision.kernels.{checks}"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 differences" in done.stdout
