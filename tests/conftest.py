"""What all rooms' tests share: one process group of one process, one thread, no compilation at run time."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron's fused losses would compile for 18 s at their first call

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples in every run, and no limit of time for one: what fails, fails for everybody.
settings.register_profile("suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the fuzzing of the readers lasts."""
    parser.addoption("--fuzz", type=int, default=300, help="inputs thrown at each reader in tests/data/test_fuzz.py")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Workers share the cores, so each takes one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def single_process() -> Iterator[None]:
    """A world of one and Megatron's parallel state on it, once a session (the import takes seconds).

    Where there is a GPU its tensors have NCCL: tests of both devices may share the process.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
