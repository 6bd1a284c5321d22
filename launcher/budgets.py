"""How often a run is started again, and after what pause: pure functions of how its attempts ended.

Owns: counting (`spent`, `delay`) and reading it from a run's files (`history`). The budgets are conf/budgets.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..conf.budgets import BACK_OFF, BUDGETS, UNLIMITED
from .run.layout import AttemptDir, RunDir
from .run.manifest import MANIFEST
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


@dataclass
class Ground:
    """How far the attempts have got, oldest first.

    An attempt has got further if it did a step that none had done before. Where ground was lost (a damaged checkpoint,
    a resume from an older step) that may take long: then a newer checkpoint than the last attempt's counts as well. An
    attempt that only saves the same once more has not got further, however often it does.
    """

    best: int = 0  # the last step that any attempt did
    saved: int = 0  # the step of the newest checkpoint that the last saving attempt of this series left

    def gained(self, attempt: AttemptDir, outcome: Outcome | None, is_mine: bool = True) -> bool:
        """Whether the attempt that comes next got further; it is counted in. `is_mine`: it belongs to the series."""
        try:
            reached, saved = reached_by(attempt, outcome), saved_by(attempt, outcome) if is_mine else 0
        except OSError:  # of no consequence for whether the run goes on
            return False
        has_gained = reached > self.best or saved > self.saved
        self.best, self.saved = max(self.best, reached), saved or self.saved
        return has_gained


def history(
    run: RunDir, mine: Sequence[AttemptDir], config: Mapping[str, Any], ground: Ground | None = None, until: int = 0
) -> list[Past]:
    """How the attempts `mine` ended, oldest first. `ground`: counts them, and all others before attempt `until`."""
    ground = Ground() if ground is None else ground
    wanted = {a.number for a in mine}
    found = []
    for attempt in run.all_attempts():
        if until and attempt.number >= until:
            break
        outcome, is_mine = Outcome.seen(attempt), attempt.number in wanted
        got_further = ground.gained(attempt, outcome, is_mine)
        if is_mine:
            found.append(past_of(attempt, outcome, got_further, config))
    return found


def reached_by(attempt: AttemptDir, outcome: Outcome | None) -> int:
    """The last step that an attempt is known to have done."""
    step = last_metric([attempt]).get("step")
    return max(step if isinstance(step, int) else 0, (outcome.step or 0) if outcome else 0)


def saved_by(attempt: AttemptDir, outcome: Outcome | None) -> int:
    """The step of the newest checkpoint that an attempt has published."""
    run = RunDir(attempt.path.parents[1])
    theirs = (c for c in run.all_checkpoints() if c.attempt == attempt.number)
    newest = next((c.step for c in theirs if (run.checkpoint(c) / MANIFEST).exists()), 0)
    return max(newest, (outcome.saved_step or 0) if outcome else 0)


def past_of(attempt: AttemptDir, outcome: Outcome | None, got_further: bool, config: Mapping[str, Any]) -> Past:
    """`got_further`: as Ground has it."""
    if (config.get("task") or {}).get("cmd"):
        got_further = got_further or _is_through(outcome) or made_progress(attempt)
    if outcome is None:
        return Past(NO_WORD, got_further)
    return Past(outcome.cause.value, got_further, outcome.reason)


def _is_through(outcome: Outcome | None) -> bool:
    """Whether a script of the user's own, which need not tell its steps, has done its part: it ran into the time limit,
    and nothing went wrong when it was asked to stop."""
    if outcome is None or outcome.cause is not Cause.TIME_LIMIT:
        return False
    return bool(outcome.evidence.get("generation", 1)) and not outcome.evidence.get("failed_stops")
