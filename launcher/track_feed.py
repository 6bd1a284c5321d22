"""A run's metrics as a stream: every new optimizer step once, ascending, with the rewinds that lie before it.

Owns: tailing the metrics files of all attempts, which line of a step counts, what a rewind is, and whether the run is
over. Does not own: where the steps go (track.py). Nothing here writes. Standard library only.

The order in the stream is that of the files: each source (attempt, generation) gives its steps up to the first one
that a later source has done again. That is the view of run/views.py, but read once and in bounded memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .run.layout import RunDir
from .run.outcome import EXIT_CANCELLED, Cause, Next, Outcome
from .run.submissions import submissions
from .state import attempts_of

Record = dict[str, Any]
_END = 1 << 16  # bytes at the end of a file in which its last whole line is looked for
_NEVER = 1 << 62  # above every step


@dataclass(frozen=True)
class Rewind:
    """Steps that were done again, because the run went on from an older checkpoint."""

    number: int  # of the run's rewinds, from 1
    attempt: int  # that did them again
    from_step: int  # the last step done before
    to_step: int  # the last step that was kept

    @property
    def steps(self) -> int:
        return self.from_step - self.to_step


@dataclass(frozen=True)
class Row:
    """One optimizer step. `rewinds`: those that end with this step, the first new one after them."""

    step: int
    attempt: int
    generation: int
    record: Record
    rewinds: tuple[Rewind, ...] = ()


@dataclass
class _Source:
    """One metrics file, read on from where the last look ended."""

    attempt: int
    generation: int
    path: Path
    offset: int = 0
    first_step: int | None = None  # None while there is no whole line

    def look(self) -> None:
        if self.first_step is None:
            self.first_step = next((r["step"] for _, r in self._lines(0)), None)

    def rows(self, below: int) -> Iterator[Row]:
        """New rows with step < `below`; the first that is not stays unread."""
        for end, record in self._lines(self.offset):
            if record["step"] >= below:
                return
            self.offset = end
            yield Row(record["step"], self.attempt, self.generation, record)

    def last_step(self) -> int:
        """Of the last whole line, 0 if there is none."""
        with open(self.path, "rb") as f:
            start = max(0, f.seek(0, os.SEEK_END) - _END)
        return max((r["step"] for _, r in self._lines(start)), default=0)

    def _lines(self, start: int) -> Iterator[tuple[int, Record]]:
        """(offset behind it, record) of each whole line from `start`. A last line without its end is left for later."""
        with open(self.path, "rb") as f:
            f.seek(start)
            for line in f:
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                record = _parse(line)
                if record is not None:
                    yield start, record


def _parse(line: bytes) -> Record | None:
    """None for what is no record: a torn line that a later one has closed, or the rest of one cut by an offset."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


class Feed:
    """The stream from step `sent` + 1 on. Can be taken from again and again as the files grow."""

    def __init__(self, run: RunDir, sent: int) -> None:
        self.run, self.sent = run, sent
        self._sources: dict[Path, _Source] = {}
        self._rewinds: dict[Path, Rewind] = {}

    @property
    def rewinds(self) -> list[Rewind]:
        """All rewinds of the run that the last `take` knew of, oldest first."""
        return sorted(self._rewinds.values(), key=lambda r: r.number)

    def take(self, is_over: bool = False) -> Iterator[Row]:
        """What is new. `is_over`: no attempt will follow, so that steps which none has done again count after all."""
        sources = self._look()
        open_rewinds = [r for r in self.rewinds if r.from_step >= self.sent]
        for row in self._in_order(sources, is_over):
            if row.step <= self.sent:
                continue
            passed = tuple(r for r in open_rewinds if row.step > r.from_step and row.attempt >= r.attempt)
            open_rewinds = [r for r in open_rewinds if r not in passed]
            self.sent = row.step
            yield Row(row.step, row.attempt, row.generation, row.record, passed)

    def _look(self) -> list[_Source]:
        """All sources, oldest first."""
        found = []
        for attempt in self.run.all_attempts():
            for generation, path in attempt.all_metrics():
                source = self._sources.setdefault(path, _Source(attempt.number, generation, path))
                source.look()
                found.append(source)
        for i, source in enumerate(found):
            self._note_rewind(source, found[:i])
        return found

    def _note_rewind(self, source: _Source, earlier: list[_Source]) -> None:
        if source.first_step is None or not earlier or source.path in self._rewinds:
            return
        # Processes of an older attempt may still be writing: what they do after this moment is no rewind.
        last = max(s.last_step() for s in earlier)
        if source.first_step <= last:
            self._rewinds[source.path] = Rewind(len(self._rewinds) + 1, source.attempt, last, source.first_step - 1)

    def _in_order(self, sources: list[_Source], is_over: bool) -> Iterator[Row]:
        for source, below in zip(sources, self._limits(sources, is_over), strict=True):
            yield from source.rows(below)
        if is_over:
            for source in reversed(sources):
                yield from source.rows(_NEVER)

    def _limits(self, sources: list[_Source], is_over: bool) -> list[int]:
        """Per source, the first step that a later one has done again.

        As long as the newest attempt has not shown where it starts, nothing more is taken from the older ones: it
        may be about to do their last steps again.
        """
        attempts = self.run.all_attempts()
        newest = attempts[-1].number if attempts else 0
        limit = _NEVER
        if not is_over and newest not in {s.attempt for s in sources}:
            limit = 0
        limits = []
        for source in reversed(sources):
            limits.append(limit)
            if source.first_step is not None:
                limit = min(limit, source.first_step)
            elif source.attempt == newest and not is_over:
                limit = 0
        return limits[::-1]


def final_outcome(run: RunDir) -> Outcome | None:
    """How the run ended; None while it may go on. Read before the metrics: they are complete then."""
    known = submissions(run)
    if not known:
        return None
    attempts = attempts_of(run, known[-1])
    outcome = Outcome.read(attempts[-1]) if attempts else None
    if outcome is not None and outcome.next is Next.NOTHING:
        return outcome
    if known[-1].is_cancelled and (outcome is not None or not attempts):
        return Outcome(Cause.CANCELLED, Next.NOTHING, EXIT_CANCELLED, "cancelled before it started again")
    return None
