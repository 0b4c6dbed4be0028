"""The trainer's text and corpus."""

from tests.trainer.conftest import prepared, text

__all__ = ["prepared", "text"]
