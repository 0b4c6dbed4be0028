"""Ordered rules on linears: which rule decides a linear, and which rules decide nothing. No torch here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from nvfp4_train.precision.config import PrecisionError, Rule
from nvfp4_train.precision.fit import LinearShape


def matches(rule: Rule, shape: LinearShape) -> bool:
    """Whether all that the rule gives (glob on the global name, letter, role) holds for the linear."""
    return (
        (rule.match is None or fnmatchcase(shape.name, rule.match))
        and (rule.letter is None or rule.letter == shape.letter)
        and (rule.role is None or rule.role == shape.role)
    )


def first_match(rules: Sequence[Rule], shape: LinearShape) -> int | None:
    """Index of the first rule that matches, which is the one that decides."""
    return next((index for index, rule in enumerate(rules) if matches(rule, shape)), None)


def check_user_rules(rules: Sequence[Rule], shapes: Sequence[LinearShape]) -> None:
    """Refuse a user's rule that decides nothing: a rule that is written is meant to do something.

    Raises:
        PrecisionError: a rule that matches no linear, with near misses, or only linears that earlier rules decide.
    """
    for index, rule in enumerate(rules):
        matched = [shape for shape in shapes if matches(rule, shape)]
        name = f"precision.rules[{index}] ({rule})"
        if not matched:
            raise PrecisionError(f"{name} matches no linear of this model. {_near_misses(rule, shapes)}")
        deciding = [first_match(rules, shape) for shape in matched]
        if index not in deciding:
            before = dict.fromkeys(str(rules[earlier]) for earlier in deciding if earlier is not None)
            raise PrecisionError(
                f"{name} decides nothing: the first matching rule decides, and what it matches is decided by "
                f"{' and '.join(before)}. Write it before them, or leave it out."
            )


def _near_misses(rule: Rule, shapes: Sequence[LinearShape]) -> str:
    """What the model has that is near to what the rule asks for."""
    letters = sorted({shape.letter for shape in shapes if shape.letter})
    roles = list(dict.fromkeys(shape.role for shape in shapes))
    hints = []
    if rule.match is not None and not any(fnmatchcase(shape.name, rule.match) for shape in shapes):
        names = [shape.name for shape in shapes]
        tails = list(dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in names if "." in name))
        near = difflib.get_close_matches(rule.match, [*tails, *names], n=3, cutoff=0.5)
        hints.append(f"Globs see whole names such as {names[0]}; near: {', '.join(near or tails)}.")
    if rule.letter is not None and rule.letter not in letters:
        hints.append(f"The model has blocks {', '.join(letters)}.")
    if rule.role is not None and rule.role not in roles:
        near = difflib.get_close_matches(rule.role, roles, n=3, cutoff=0.5)
        hints.append(f"The model has roles {', '.join(near or roles)}.")
    return " ".join(hints) or "Each of its conditions matches some linear, but no linear meets all of them."
