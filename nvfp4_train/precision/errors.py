"""The error of this room."""


class PrecisionError(ValueError):
    """A user's mistake about precision: says what was wrong, why, and what to write instead."""
