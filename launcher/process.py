"""Knowing a process again: by host, pid and start time, so that a reused pid is never taken for it.

Owns: that, and which process loops over a submission that is worked on without sbatch. Standard library only.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .run.files import read_json
from .run.layout import RunDir
from .run.process_start import start_ticks
from .run.submissions import Submission


@dataclass(frozen=True)
class ProcessId:
    host: str
    pid: int
    start: int  # clock ticks since boot

    @staticmethod
    def own() -> ProcessId:
        start = start_ticks(os.getpid())
        assert start is not None
        return ProcessId(os.uname().nodename, os.getpid(), start)

    @staticmethod
    def of(record: dict[str, Any]) -> ProcessId | None:
        try:
            return ProcessId(str(record["host"]), int(record["pid"]), int(record["start"]))
        except (KeyError, TypeError, ValueError):
            return None

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def is_alive(self) -> bool | None:
        """None if it lives, or lived, on another host."""
        if self.host != os.uname().nodename:
            return None
        return start_ticks(self.pid) == self.start


def loop_path(run: RunDir, submission: int) -> Path:
    """Which process loops over a submission's attempts: written once by itself (local.py)."""
    return run.submissions / f"{submission:04d}.local.json"


def loop_process(submission: Submission) -> ProcessId | None:
    """The loop that works, or worked, on a submission; None if none has reported."""
    try:
        return ProcessId.of(read_json(loop_path(submission.run, submission.number)))
    except (FileNotFoundError, ValueError):
        return None
