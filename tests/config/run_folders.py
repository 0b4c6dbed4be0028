"""Starting a run as far as its folder goes, with checkpoints that hold no weights."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from nvfp4_train.checkpoints.files import INDEX, Header, publish, step_folder
from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.run_folder import RunFolder, prepare_run_folder

ENVIRONMENT = {"versions": {"python": "3.12"}, "host": "here", "device": "cpu", "world_size": 1, "commit": "abc"}


def start(config: RunConfig, **changes: Any) -> RunFolder:
    from nvfp4_train.compose import replaced

    folder = prepare_run_folder(replaced(config, changes))
    if folder.nothing_to_do() is None:
        folder.record(ENVIRONMENT, {"recipe": folder.config.precision.name})
    folder.leave()
    return folder


def checkpoint(run: Path, step: int) -> Path:
    """A whole checkpoint of a run, and the metrics that go before it."""
    final = step_folder(run / "checkpoints", step)
    temporary = final.with_name(final.name + ".tmp")
    temporary.mkdir(parents=True)
    (temporary / INDEX).write_bytes(pickle.dumps({}))
    (temporary / "__0_0.distcp").write_bytes(b"weights")
    publish(temporary, final, Header(step, step * 16, step * 4096, 0, "nvfp4", {}, 1), {})
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(1, step + 1)))
    return final


def refused(config: RunConfig, **changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        start(config, **changes)
    return str(error.value)
