"""How often a run is started again, and after what pause: pure functions of how its attempts ended.

Owns: counting (`spent`, `delay`) and reading it from a run's files (`history`). The budgets are conf/budgets.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..conf.budgets import BACK_OFF, BUDGETS, UNLIMITED
from .run.layout import AttemptDir, RunDir
from .run.outcome import Cause, Outcome
from .run.views import made_progress
from .summary import last_metric

NO_WORD = "no_word"


@dataclass(frozen=True)
class Past:
    """One attempt that is over. `cause`: name of its budget."""

    cause: str
    has_progressed: bool
    reason: str = ""


def limits(config: Mapping[str, Any]) -> dict[str, int]:
    """The budgets in force: the defaults, with `resilience.budgets` over them."""
    return {**BUDGETS, **(config["resilience"].get("budgets") or {})}


def fruitless(past: Sequence[Past]) -> list[Past]:
    """The newest attempts in a row that got no further."""
    found: list[Past] = []
    for attempt in reversed(past):
        if attempt.has_progressed:
            break
        found.insert(0, attempt)
    return found


def spent(past: Sequence[Past], allowed: Mapping[str, int]) -> str | None:
    """Why the run must not start again, None if it may. `past`: oldest first, the one that has just ended last."""
    row = fruitless(past)
    for cause in dict.fromkeys(p.cause for p in reversed(row)):
        count, limit = sum(p.cause == cause for p in row), allowed.get(cause, UNLIMITED)
        if limit != UNLIMITED and count > limit:
            last = next(p.reason for p in reversed(row) if p.cause == cause)
            times = f"{count} attempts in a row made no progress and ended with {cause}"
            return f"{times} (resilience.budgets.{cause}={limit}); the last one: {last or 'it could not say why'}"
    return None


def delay(past: Sequence[Past], first: float, longest: float) -> float:
    """Seconds until the next start: `first` after a failed one, twice as much after each more in a row."""
    row = fruitless(past)
    if not row or row[-1].cause not in BACK_OFF:
        return 0.0
    failures = sum(p.cause in BACK_OFF for p in row)
    return float(min(first * 2.0 ** min(failures - 1, 30), longest))


def history(run: RunDir, mine: Sequence[AttemptDir], config: Mapping[str, Any]) -> list[Past]:
    """How the attempts `mine` ended, oldest first. Progress: further than any attempt of the run before it."""
    wanted = {a.number for a in mine}
    found, best = [], 0
    for attempt in run.all_attempts():
        outcome = Outcome.read(attempt)
        reached = reached_by(attempt, outcome)
        if attempt.number in wanted:
            found.append(past_of(attempt, outcome, reached > best, config))
        best = max(best, reached)
    return found


def reached_by(attempt: AttemptDir, outcome: Outcome | None) -> int:
    """The last step that an attempt is known to have done."""
    step = last_metric([attempt]).get("step")
    return max(step if isinstance(step, int) else 0, (outcome.step or 0) if outcome else 0)


def past_of(attempt: AttemptDir, outcome: Outcome | None, got_further: bool, config: Mapping[str, Any]) -> Past:
    """`got_further`: did a step that none had done before."""
    if (config.get("task") or {}).get("cmd"):
        # A script of the user's own need not tell its steps: one that ran into the time limit has done its part.
        is_through = outcome is not None and outcome.cause is Cause.TIME_LIMIT
        got_further = got_further or is_through or made_progress(attempt)
    if outcome is None:
        return Past(NO_WORD, got_further)
    return Past(outcome.cause.value, got_further, outcome.reason)
