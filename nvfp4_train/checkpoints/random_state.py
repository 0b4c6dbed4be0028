"""Every generator that a run may draw from, as plain values that a checkpoint loads without running code."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


def random_states() -> dict[str, Any]:
    """States of Python's, numpy's and torch's generators and of Megatron's tracker, as numbers, lists and tensors."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": {name: state.clone() for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()},
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put every generator back where `random_states` found it. A CUDA state is left out where there is no CUDA."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Whatever the block draws, the generators stand afterwards where they stood before."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
