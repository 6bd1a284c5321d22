"""Verdicts of drills: what was found of a run against what must be. Pure values; reading is `find`'s only.

A run that was disturbed must go exactly as one that was not: every loss and the final weights, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..run.layout import CheckpointName
from ..run.manifest import InvalidCheckpointError
from ..run.outcome import Cause
from ..run.verification import verify
from . import measure
from .measure import Cost
from .trial import Trial


@dataclass(frozen=True)
class Calm:
    """The undisturbed run. `losses` by step; `weights`: digest of each shard of the last checkpoint."""

    losses: dict[int, float]
    weights: dict[str, str]


@dataclass(frozen=True)
class Expected:
    """`causes`: of the attempts before the last, None for any; `most_lost`: steps that may be lost at most."""

    causes: tuple[str | None, ...]
    most_lost: int


@dataclass(frozen=True)
class Facts:
    """What became of a disturbed run. `causes`: of all attempts, None for one that could not say."""

    causes: tuple[str | None, ...]
    losses: dict[int, float]
    weights: dict[str, str]
    invalid: tuple[str, ...]  # checkpoints that do not verify, and why
    cost: Cost


def find(trial: Trial, steps: int, at: float) -> Facts:
    """Read a run that has ended; `at`: when it was disturbed, Unix seconds."""
    return Facts(
        causes=tuple(o.cause.value if o else None for o in trial.outcomes()),
        losses=trial.losses(),
        weights=trial.weights(steps),
        invalid=tuple(_invalid(trial, name) for name in trial.dir.all_checkpoints() if _invalid(trial, name)),
        cost=measure.cost(measure.passes(trial.dir), at),
    )


def _invalid(trial: Trial, name: CheckpointName) -> str:
    try:
        verify(trial.dir.checkpoint(name))
    except InvalidCheckpointError as e:
        return f"{name}: {e}"
    return ""


def judge(facts: Facts, expected: Expected, calm: Calm) -> list[str]:
    """What is wrong, a line each; empty: PASS."""
    wrong = []
    if facts.causes[-1:] != (Cause.FINISHED.value,):
        wrong.append(f"it did not finish: {_said(facts.causes)}")
    elif not _fit(facts.causes[:-1], expected.causes):
        wrong.append(f"attempts ended as {_said(facts.causes[:-1])}, expected {_said(expected.causes)}")
    if facts.cost.steps_lost > expected.most_lost:
        wrong.append(f"{facts.cost.steps_lost} steps lost, expected {expected.most_lost} at most")
    if facts.cost.new_step is None:
        wrong.append("no step was done that had not been done before it was disturbed")
    missing = sorted(calm.losses.keys() - facts.losses.keys())
    different = [s for s, loss in sorted(calm.losses.items()) if s in facts.losses and facts.losses[s] != loss]
    if missing:
        wrong.append(f"{len(missing)} steps have no loss, the first of them {missing[0]}")
    if different:
        s = different[0]
        wrong.append(f"{len(different)} losses differ, first at step {s}: {facts.losses[s]!r} for {calm.losses[s]!r}")
    if facts.weights != calm.weights:
        wrong.append("the final weights differ" if facts.weights else "there is no final checkpoint")
    return [*wrong, *(f"invalid checkpoint {text}" for text in facts.invalid)]


def _fit(found: Sequence[str | None], expected: Sequence[str | None]) -> bool:
    return len(found) == len(expected) and all(e in (None, f) for f, e in zip(found, expected, strict=True))


def _said(causes: Sequence[str | None]) -> str:
    return ", ".join(c or "(no word)" for c in causes) or "(none)"
