"""The scripts that time a GPU, where there is none."""

from __future__ import annotations

import sys

import torch


def need_card() -> None:
    """Ends the script with exit code 2 and a sentence where there is no CUDA device."""
    if not torch.cuda.is_available():
        print(
            "error: this times a GPU, and there is no CUDA device (see python -m nvfp4_train.doctor).", file=sys.stderr
        )
        sys.exit(2)
