"""What users read as one thing: metrics, events and state of a run, merged from the files of all its attempts.

Owns: reading and merging. Nothing here writes. Of two lines for one step the one of the highest (attempt,
generation) counts: it is the one whose weights went on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

from .files import read_lines
from .layout import AttemptDir, RunDir
from .outcome import Outcome

Record = dict[str, Any]


def metrics(run: RunDir) -> list[Record]:
    """One record per optimizer step, ascending, with `attempt` and `generation` added."""
    by_step: dict[int, Record] = {}
    for attempt in run.all_attempts():
        for generation, path in attempt.all_metrics():
            for record in read_lines(path):
                step = record.get("step")
                if isinstance(step, int):
                    # Later (attempt, generation) files are read later, so they win.
                    by_step[step] = record | {"attempt": attempt.number, "generation": generation}
    return [by_step[step] for step in sorted(by_step)]


def events(run: RunDir) -> list[Record]:
    """Events of all writers by attempt and time. Clocks of nodes may differ; within a writer, order is exact."""
    return [record for attempt in run.all_attempts() for record in attempt_events(attempt)]


def attempt_events(attempt: AttemptDir) -> Iterator[Record]:
    """The events of one attempt, as `events` orders them."""
    found: list[tuple[float, Record]] = []
    for path in sorted((attempt.path / "events").glob("*.jsonl")):
        latest = 0.0
        for record in read_lines(path):
            # A clock that is set back must not turn one writer's order round.
            latest = max(latest, record.get("time", 0.0))
            found.append((latest, record))
    found.sort(key=lambda pair: pair[0])
    return iter([record for _, record in found])


def last_outcome(run: RunDir) -> tuple[AttemptDir, Outcome | None] | None:
    """The newest attempt and its outcome (None while it has none); None if no attempt was ever started."""
    attempts = run.all_attempts()
    return (attempts[-1], Outcome.read(attempts[-1])) if attempts else None


def made_progress(attempt: AttemptDir) -> bool:
    """Whether an attempt got anywhere: a step that was told, or something left in the directory for checkpoints.

    A script of the user's own need not tell its steps. Times are the file system's, so clocks do not matter; what one
    attempt has left counts for it until a later one replaces it.
    """
    if any(path.stat().st_size for _, path in attempt.all_metrics()):
        return True
    run = RunDir(attempt.path.parents[1])
    try:
        began = attempt.start.stat().st_mtime
        left = [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(run.checkpoints)]
    except OSError:
        return False
    later = [_began(a) for a in run.all_attempts() if a.number > attempt.number]
    ended = min((t for t in later if t is not None), default=math.inf)
    return any(began < t <= ended for t in left)


def _began(attempt: AttemptDir) -> float | None:
    try:
        return attempt.start.stat().st_mtime
    except OSError:
        return None
