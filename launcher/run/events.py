"""Events: one line of JSON per thing that happened, written by one process per file, never rewritten.

Owns: the record's common fields and appending. What users read as the run's events is a view (views.py).
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import append_line, to_json


@dataclass(frozen=True)
class EventLog:
    """Appends events of one writer to one file.

    Every record has `time` (Unix seconds), `writer`, `attempt` and `event` (a short name such as `warned`,
    `checkpoint_saved`, `worker_exited`); the other fields belong to the event.
    """

    path: Path
    writer: str
    attempt: int

    def write(self, event: str, /, **fields: Any) -> None:
        """Append an event. A full or failing disk costs the event, told on standard error, and never the run."""
        record = {"time": round(time.time(), 3), "writer": self.writer, "attempt": self.attempt, "event": event}
        try:
            append_line(self.path, to_json(fields | record))
        except OSError as e:
            with contextlib.suppress(OSError):
                print(f"event {event} is not recorded: {e}", file=sys.stderr, flush=True)
