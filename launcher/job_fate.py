"""What becomes of a job, in one word. By itself, since the launching side needs it and not the policy's vocabulary."""

from __future__ import annotations

from enum import Enum


class JobFate(str, Enum):
    """What Slurm says of our job when something signals us."""

    RUNNING = "running"
    PREEMPTED = "preempted"  # in its grace time
    REQUEUED = "requeued"  # by Slurm itself: node failure, preemption without grace, an administrator
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    NODE_FAIL = "node_fail"  # ended for a failed node and not requeued
    ENDED = "ended"  # its batch script ended, or was killed, though nobody cancelled it
    TAKEN = "taken"  # preempted and not requeued (PreemptMode=CANCEL)
    UNKNOWN = "unknown"
