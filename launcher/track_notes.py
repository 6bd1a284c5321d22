"""What trackers did: one line in report/track.jsonl when a session with W&B opens, one when it closes in order.

Owns: those lines. They are for people; the tracker itself asks W&B (track.py says why), and these only where wandb's
own files were cleaned away, or were left by another host. Standard library only.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .run.files import append_line, read_lines, to_json


@dataclass(frozen=True)
class Notes:
    path: Path

    def write(self, event: str, **fields: Any) -> None:
        """`event`: opened, closed, or gave_up (wandb failed too often).

        Fields: mode, sent (the last step sent), and what belongs to the event.
        """
        record = {"time": round(time.time(), 3), "host": socket.gethostname(), "pid": os.getpid(), "event": event}
        append_line(self.path, to_json(record | fields))

    def recorded_step(self) -> int:
        """The last step of the offline sessions that closed in order: recorded, whatever became of the files."""
        closed = (r for r in read_lines(self.path) if r.get("event") == "closed" and r.get("mode") == "offline")
        return max((r["sent"] for r in closed if isinstance(r.get("sent"), int)), default=0)

    def ended_elsewhere(self) -> bool:
        """Whether the last session did not close in order, on another host."""
        lines = [r for r in read_lines(self.path) if r.get("event") in ("opened", "closed")]
        return bool(lines) and lines[-1].get("event") == "opened" and lines[-1].get("host") != socket.gethostname()
