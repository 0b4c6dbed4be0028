"""What is printed: libraries say nothing that concerns no reader of our messages, and every letter can be shown."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper


def show_any_letter() -> None:
    """From here on a terminal that lacks a letter shows its number: no command ends of it."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def heard(name: str) -> Iterator[list[str]]:
    """Silences the logger `name` (a library that logs what it then raises, or what we decided on purpose); gives what
    it says of errors meanwhile."""
    logger, said = logging.getLogger(name), _Kept(logging.ERROR)
    former = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [said], False
    try:
        yield said.lines
    finally:
        logger.handlers, logger.propagate = former


class _Kept(logging.Handler):
    """Keeps lines."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


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
