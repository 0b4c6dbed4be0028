"""`python -m nvfp4_train.train [overrides]`: trains one model, or continues the run that run_dir holds."""

from __future__ import annotations

import logging
import sys
import warnings

from data.quiet import quiet
from nvfp4_train import cli
from nvfp4_train.config import RunConfig


def body(config: RunConfig) -> int:
    """The run, once the configuration is known to be good; torch and Megatron are imported here and not before."""
    with quiet():  # a warning for every optional library that is not installed
        from nvfp4_train.trainer import train
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    return train(config)


def main() -> None:
    """Entry point; leaves with an exit code of `exits.ExitCode`."""
    sys.exit(cli.run(body, "train"))


if __name__ == "__main__":
    main()
