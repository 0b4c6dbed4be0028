"""Training as a GPU does it, with updates that are launched before anyone knows whether there is one, on a CPU.

AdamW's kernel runs in Triton's interpreter, which must be chosen before Triton is imported:
TRITON_INTERPRET=1 python -m tests.trainer.launched_update_checks
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest

from nvfp4_train.compose import compose
from nvfp4_train.config import RunConfig
from nvfp4_train.exits import ExitCode
from nvfp4_train.metrics import Metrics
from nvfp4_train.trainer import train
from tests.trainer.conftest import TINY
from tests.trainer.test_trainer import lines, poison, unchanged


def check_a_skipped_step(folder: Path) -> None:
    """A step whose gradient is bad leaves all as it was, and the run goes on as with torch's AdamW."""
    (folder / "text.txt").write_text("".join(f"line {number} of a text, \n" for number in range(1000)))
    shared = [
        *TINY,
        "model.pattern=M-",
        "precision=fp8_delayed",
        "steps=3",
        f"data.path={folder / 'text.txt'}",
        "evaluation.every=0",
    ]

    def run(name: str) -> tuple[list[tuple[bool, bool, bool]], list[Metrics]]:
        config: RunConfig = compose([*shared, f"data.prepared={folder / 'prepared'}", f"run_dir={folder / name}"])
        with pytest.MonkeyPatch.context() as patched:
            poison(patched, {2}, "decoder.layers.1.mlp.linear_fc1.weight")
            seen = unchanged(patched)
            assert train(config) == ExitCode.DONE
        return seen, lines(config)

    with patch("nvfp4_train.optimizer.on_gpu", lambda chunks: True):
        seen, launched = run("launched")
    assert seen == [(False, False, False), (True, True, True), (False, False, False)]
    _, plain = run("plain")
    for name in ("train/loss", "val/loss"):
        found, expected = ([line[name] for line in run_lines if name in line] for run_lines in (launched, plain))
        assert found == pytest.approx(expected, rel=1e-4)


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        check_a_skipped_step(Path(temporary))
    print("equal")
