"""What a run ran on: versions, commit, host and device, as plain values for `environment.json`. No torch here."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

# Distributions whose version can change a number or a file, in the order they are shown.
PACKAGES = (
    "torch",
    "megatron-core",
    "triton",
    "transformer-engine",
    "mamba-ssm",
    "causal-conv1d",
    "numpy",
    "datasets",
    "tokenizers",
    "hydra-core",
    "wandb",
)

# Rooms whose code a run executes.
ROOMS = ("nvfp4_train", "models", "data")
# Beginnings of the names of variables by which libraries choose other kernels or other orders of summation.
COUNTING = ("NVTE_", "CUBLAS_", "MAMBA_", "TORCHDYNAMO_", "TORCH_ALLOW_TF32", "NVIDIA_TF32", "MKL_", "OMP_NUM_THREADS")


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Python's version and those of PACKAGES that are installed; torch's own (`2.11.0+cpu`) once it is imported."""
    found = {"python": platform.python_version()}
    found |= {package: number for package in PACKAGES if (number := version(package)) is not None}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
    return found


def sources() -> str:
    """Short hash of all Python files that a run executes: the same for the same code, wherever it lies."""
    root = Path(__file__).resolve().parent.parent
    found = hashlib.sha256()
    for file in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        found.update(f"{file.relative_to(root)}\n".encode())
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def environment_that_counts() -> dict[str, str]:
    """The environment variables that can change a number in its last bits."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(COUNTING)}


def commit() -> str | None:
    """The commit of this clone, with `+changes` where files differ from it; None outside a clone or without git."""
    folder = Path(__file__).resolve().parent.parent
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+changes" if changed else head


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True, timeout=10
    )
    return done.stdout.strip()


def environment(device: str, world_size: int, compute_capability: tuple[int, int] | None = None) -> dict[str, Any]:
    """The content of `environment.json`.

    Args:
        device: name of what this rank computes on, such as `cpu` or `NVIDIA H200`.
        world_size: processes of the run.
        compute_capability: of a CUDA device.
    """
    return {
        "versions": versions(),
        "commit": commit(),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "device": device,
        "compute_capability": ".".join(map(str, compute_capability)) if compute_capability else None,
        "world_size": world_size,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
