"""What an interruption cost: steps that were done twice, and the time until the run got further than ever before.

Owns: those figures, from the metrics files alone. Pure but for `passes`, which reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..run.files import read_lines
from ..run.layout import RunDir


@dataclass(frozen=True)
class Pass:
    """The steps that one generation of workers did. `steps`: (optimizer step, Unix seconds at its end), never empty."""

    attempt: int
    generation: int
    steps: tuple[tuple[int, float], ...]

    @property
    def first(self) -> int:
        return self.steps[0][0]

    @property
    def last(self) -> int:
        return self.steps[-1][0]

    @property
    def began(self) -> float:
        return self.steps[0][1]


@dataclass(frozen=True)
class Cost:
    """`steps_lost`: completed, and computed again. `new_step`: the first that nobody had done before the event;
    `seconds`: from the event to its end. None: there was none."""

    steps_lost: int
    new_step: int | None
    seconds: float | None


def passes(run: RunDir) -> list[Pass]:
    """Oldest first; generations that made no step are left out."""
    found = []
    for attempt in run.all_attempts():
        for generation, path in attempt.all_metrics():
            steps = tuple((int(r["step"]), float(r["time"])) for r in read_lines(path) if "step" in r and "time" in r)
            if steps:
                found.append(Pass(attempt.number, generation, steps))
    return found


def steps_lost(found: Sequence[Pass]) -> int:
    """Steps that were completed and had to be computed again; one that was lost twice counts twice."""
    return sum(max(0, before.last - after.first + 1) for before, after in pairwise(found))


def cost(found: Sequence[Pass], event: float) -> Cost:
    """Of what happened at `event` (Unix seconds). Steps that its victims still finished do not count as new."""
    before = [p for p in found if p.began <= event]
    after = [p for p in found if p.began > event]
    reached = max((p.last for p in before), default=0)
    new = [(step, time) for p in after for step, time in p.steps if step > reached]
    if not new:
        return Cost(steps_lost(found), None, None)
    step, time = new[0]
    return Cost(steps_lost(found), step, time - event)
