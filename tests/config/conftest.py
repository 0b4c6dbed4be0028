"""A configuration to start runs of, each test in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nvfp4_train.compose import compose
from nvfp4_train.config import RunConfig
from nvfp4_train.run_folder import release_locks


@pytest.fixture
def unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test's folder is the working one, and no lock outlives the test."""
    monkeypatch.chdir(tmp_path)
    yield
    release_locks()


@pytest.fixture(scope="session")
def base() -> RunConfig:
    """Twenty steps of the quickstart."""
    return compose(["steps=20"])
