"""Keeps libraries from printing what concerns no reader of our messages; errors still rise as exceptions."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_logger(name: str) -> Iterator[None]:
    """Silences the logger `name` (a library that logs what it then raises, or what we decided on purpose)."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings, from `warnings` or from loggers: megatron.core warns of every optional library that is not there,
    and of settings that are on purpose here."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
