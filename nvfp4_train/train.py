"""`python -m nvfp4_train.train [overrides]`: trains one model, or continues the run that run_dir holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nvfp4_train.config import RunConfig
from nvfp4_train.signals import end_with_launcher, leave_at_once


def body(config: RunConfig) -> int:
    """The run, once the configuration is known to be good; torch and Megatron are imported here and not before."""
    from data.quiet import quiet

    # A lost connection is told by ours in one line; torch's libraries would add their C++ stack to every warning of it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with quiet():  # a warning for every optional library that is not installed
        from nvfp4_train.trainer import train
    return train(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    with leave_at_once():  # before the imports, which take seconds
        end_with_launcher()
        from nvfp4_train import cli

        return cli.run(body, "train", argv)


if __name__ == "__main__":
    sys.exit(main())
