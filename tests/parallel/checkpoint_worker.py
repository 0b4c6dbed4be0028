"""Goes on from a checkpoint in one layout after another. Started by `launches`, as `worker` is.

Before it takes a step, a run writes what it loaded to `loaded/` in its folder: the same state, saved in its own layout.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch

from nvfp4_train import trainer
from nvfp4_train.checkpoints.files import read_header
from nvfp4_train.checkpoints.random_state import random_states
from nvfp4_train.checkpoints.writer import CheckpointWriter
from nvfp4_train.compose import compose
from nvfp4_train.config import CheckpointConfig
from nvfp4_train.layout import check_run
from tests.parallel.checkpoint_cases import run_cases
from tests.parallel.worker import main


class Resumed(trainer.Trainer):
    """A trainer that saves what it loaded, with random states that differ between ranks."""

    found: dict[str, Any]

    def run(self, *args: Any) -> Any:
        assert self.folder.checkpoint is not None
        Resumed.found = {"loaded": digest()}
        torch.rand(1 + self.world.rank)
        Resumed.found["saved"] = digest()
        writer = CheckpointWriter(self.folder.path / "loaded", CheckpointConfig(0), self.world, self.console.say)
        writer.request(self._state(), replace(read_header(self.folder.checkpoint), world=self.world.size))
        writer.finish()
        if self.config.name == "cases":
            Resumed.found["cases"] = run_cases(self.folder.path / "cases", self._state(), self.world)
            return 0
        return super().run(*args)


def digest() -> str:
    """Of this rank's random generators."""
    return hashlib.sha256(repr(plain(random_states())).encode()).hexdigest()


def plain(item: Any) -> Any:
    """Nested values with lists in the place of tensors."""
    if isinstance(item, dict):
        return {key: plain(value) for key, value in item.items()}
    return item.tolist() if isinstance(item, torch.Tensor) else item


def run(overrides: list[str], world_size: int) -> dict[str, Any]:
    """Digests of this rank's random states, as they were loaded and as they were saved."""
    trainer.Trainer = Resumed  # type: ignore[misc]
    config = compose(overrides)
    check_run(config, world_size)
    assert trainer.train(config) == 0
    return Resumed.found


if __name__ == "__main__":
    main(run)
