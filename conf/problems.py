"""A problem with a configuration as a value, and the exception that carries all of them.

Owns: how a problem looks in one line, and what "nearest" means for a misspelt name. Finding problems is others' work.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Problem:
    """One thing to put right: `where: field=value: message`.

    Args:
        field: dotted path as it is written on the command line (`data.sources.0.prefix`).
        value: what was found, as text; None where naming the field says all.
        message: what was expected and what to do.
        severity: a warning is worth saying and does not stop a launch.
        where: file, or file:line, for what stands in a file.
    """

    field: str
    value: str | None
    message: str
    severity: Severity = "error"
    where: str | None = None

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        found = self.field if self.value is None else f"{self.field}={self.value}"
        return f"{place}{found}: {self.message}"


class ConfigError(ValueError):
    """A configuration that cannot be used; `str()` is one line per problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The name that `word` was most likely meant to be, or None if none is close."""
    by_lower = {name.lower().replace("-", "_"): name for name in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), by_lower, n=1, cutoff=0.7)
    return by_lower[found[0]] if found else None


def no_such_choice(group: str, chosen: str, known: Sequence[str], where: str | None = None) -> Problem:
    """`model=tinny: no such choice; model has: tiny, small; nearest: tiny`."""
    near = nearest(chosen.removesuffix(".yaml"), known)
    message = f"no such choice; {group} has: {', '.join(known) or 'none'}" + (f"; nearest: {near}" if near else "")
    return Problem(group, chosen, message, where=where)
