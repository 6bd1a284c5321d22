"""How an attempt ended: causes, what follows from each, exit codes, and the record on disk.

Owns: the vocabulary that supervisor, status, watch and tests share. A cause comes from evidence (a warning that
arrived, what Slurm says of the job, an exit code), never from elapsed time. Which cause it was is policy.py's to say.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from .files import create_json, read_json
from .layout import AttemptDir

EXIT_FINISHED = 0
EXIT_FAILED = 1  # do not start again: a person has to look
EXIT_USAGE = 2  # configuration or input is wrong
EXIT_REQUEUE = 75  # start me again (sysexits' EX_TEMPFAIL); `cluster=local` restarts on it, Slurm has been told
EXIT_CANCELLED = 143  # 128 + SIGTERM: somebody asked for the end


class Cause(str, Enum):
    """Why an attempt ended. Budgets are kept per cause."""

    FINISHED = "finished"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"  # Slurm was told to start the job again, or does not say why it did
    NODE_FAILURE = "node_failure"
    HARDWARE_FAULT = "hardware_fault"
    LAUNCH_FAILED = "launch_failed"
    OUT_OF_MEMORY = "out_of_memory"
    STORAGE = "storage"
    HANG = "hang"
    CRASH = "crash"
    NO_PROGRESS = "no_progress"
    DIVERGED = "diverged"
    CANCELLED = "cancelled"
    REQUESTED = "requested"  # a training script of the user's own asked to be started again
    BAD_CONFIG = "bad_config"
    SUPERSEDED = "superseded"


SITE_S_DOING = (Cause.TIME_LIMIT, Cause.PREEMPTED, Cause.NODE_FAILURE)  # a run that ended by one of them would go on
NOT_STARTED = "not_started"  # in the evidence: why Slurm would not start a run again that was to go on


class Next(str, Enum):
    """What happens to the run after the attempt."""

    NOTHING = "nothing"  # finished, or stopped for good: only `stoker resume` starts it again
    REQUEUE = "requeue"  # the same job starts again, by our request or by Slurm's own
    CHAIN = "chain"  # the successor that waits in the queue goes on


@dataclass(frozen=True)
class Outcome:
    """The last word of an attempt (`outcome.json`)."""

    cause: Cause
    next: Next
    exit_code: int
    reason: str  # one sentence for people
    step: int | None = None  # last optimizer step that was completed by all ranks
    saved_step: int | None = None  # newest checkpoint published by this attempt
    rank: int | None = None  # the culprit, where there is one
    node: str | None = None
    traceback: str | None = None  # tail of the culprit's traceback or log
    evidence: dict[str, Any] = field(default_factory=dict)
    delay: float = 0.0  # seconds before the next start (back-off)
    time: float = field(default_factory=time.time)

    def write(self, attempt: AttemptDir) -> bool:
        """Publish; False if the attempt already has an outcome (the first one stands)."""
        return create_json(attempt.outcome, asdict(self) | {"cause": self.cause.value, "next": self.next.value})

    @staticmethod
    def read(attempt: AttemptDir) -> Outcome | None:
        """The attempt's outcome, None while it has none (still running, or killed before it could say)."""
        try:
            raw = read_json(attempt.outcome)
        except FileNotFoundError:
            return None
        try:
            return Outcome(**(raw | {"cause": Cause(raw["cause"]), "next": Next(raw["next"])}))
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(f"{attempt.outcome}: not an outcome that this version knows ({e})") from e

    @staticmethod
    def seen(attempt: AttemptDir) -> Outcome | None:
        """As `read`, and None also for one that is damaged or that storage does not give."""
        try:
            return Outcome.read(attempt)
        except (OSError, ValueError):
            return None
