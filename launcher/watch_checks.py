"""What `stoker watch` finds wrong with a run: a table of checks, each a pure function of the run's facts.

Owns: the table (a new check is a row) and the words of its findings. Facts are gathered by watch_facts.py; what
`--fix` does is watch_fix.py's. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from .run.outcome import SITE_S_DOING, Next, Outcome
from .slurm import QueuedJob
from .state import RunState, State

MOST_RELEASES = 3  # of one submission, by the watch
MOST_RESUMES = 3  # in a row that came to no step, by the watch


class Fix(str, Enum):
    """What `--fix` does about a finding."""

    RELEASE = "release"  # let a job go that Slurm holds
    RESUME = "resume"  # submit the run again
    REPLACE = "replace"  # end the job that does nothing, then resume


@dataclass(frozen=True)
class Limits:
    """Seconds, and bytes, from which something is worth a line."""

    silence: float = 300.0  # without a sign of life of supervisor and agents; the supervisor gives one every 30 s
    starting: float = 3600.0  # from a job's start until its supervisor reports
    stalled: float = 3600.0  # without a new step
    pending: float = 86400.0  # in the queue
    unavailable: float = 3600.0  # in the queue for nodes that are down or reserved
    free: float = 0.03  # of the file system
    checkpoints: float = 2.0  # for which there must be room


@dataclass(frozen=True)
class Facts:
    """What is known of one run. Ages are in seconds by the file system's clock."""

    name: str
    state: RunState
    submission: int = 0  # number of the newest
    mode: str | None = "sbatch"  # of the newest submission: sbatch, adopted, chain, local, salloc
    is_cancelled: bool = False
    queue_known: bool = True
    has_job: bool = True  # whether the newest submission's job id is known
    job: QueuedJob | None = None  # of the submission that works on the run, or will next
    continuation: str = "requeue"
    has_successor: bool | None = None  # chain: whether the next job waits; None: nobody can tell
    attempts: int = 0
    outcome: Outcome | None = None  # of the newest attempt
    waiting: float = 0.0  # since the run was submitted, or last worked on
    starting: float | None = None  # since the job started, while nothing of it has reported
    silent: float | None = None  # since the last sign of life of what works on it
    stalled: float | None = None  # since its last step, or since it started
    node_states: str = ""  # of the job's nodes, where there is a suspicion
    fruitless: int = 0  # newest attempts in a row without a step that are the run's own doing
    resumes: int = 0  # newest submissions in a row by the watch that came to no step
    releases: int = 0  # of the newest submission, by the watch
    was_replaced: bool = False  # its job was ended as headless
    alerts: tuple[str, ...] = ()  # what recent events warn of
    free: float | None = None  # of the file system, as a fraction
    free_bytes: int = 0
    checkpoint_bytes: int = 0  # of the newest checkpoint


@dataclass(frozen=True)
class Finding:
    check: str
    text: str
    fix: Fix | None = None


def duration(seconds: float) -> str:
    for limit, unit, name in ((100, 1, "s"), (100 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.1f} d"


# Reasons of squeue with which a job never starts as it is. Meanings: squeue's manual page, "JOB REASON CODES".
_NEVER = {
    "BadConstraints": "no node has what it asks for",
    "DependencyNeverSatisfied": "what it waits for can no longer happen",
    "PartitionTimeLimit": "its time is above the partition's limit",
    "PartitionNodeLimit": "it asks for more or fewer nodes than the partition gives to a job",
    "PartitionInactive": "the partition takes no jobs to start",
    "AccountNotAllowed": "its account may not use the partition",
    "QOSNotAllowed": "its QOS may not be used with this account or partition",
    "InvalidAccount": "there is no such account",
    "InvalidQOS": "there is no such QOS",
    "AssociationJobLimit": "the account's limit of jobs is reached",
    "AssociationTimeLimit": "the account's time is used up",
    "AssociationResourceLimit": "the account's limit is reached",
    "QOSUsageThreshold": "the QOS's usage threshold is passed",
    "ReservationDeleted": "its reservation is gone",
    "DeadLine": "its deadline cannot be kept",
    "MaxMemPerLimit": "it asks for more memory than a job may have",
    "NodeDown": "a node that it needs is down",
}
# One job alone is above a limit: waiting does not help.
_PER_JOB = re.compile(r"(QOS|Assoc|MaxMem|MaxCpu)\w*(PerJob|PerNode|MinCpu|MinGRES|MinMemory|WallDuration)\w*")
_UNAVAILABLE = {"ReqNodeNotAvail", "PartitionDown", "NodesInactive", "ReqNodeNotAvail(Reserved_for_maintenance)"}
_HELD_BY_SLURM = ("launch_failed_requeued_held", "jobholdmaxrequeue")  # the rest is a person's or the site's doing


def held(f: Facts, limits: Limits) -> Finding | None:
    """A job that Slurm holds after failed launches goes on when released; what a person holds is that person's."""
    if f.state.state is not State.HELD or f.job is None:
        return None
    reason = f.job.reason.lower().replace(" ", "_")
    if not any(word in reason for word in _HELD_BY_SLURM):
        return Finding("held", f"job {f.job.job_id} is held, not by Slurm's own doing: {f.state.detail}")
    if f.releases >= MOST_RELEASES:
        return Finding("held", f"job {f.job.job_id} is held again after {f.releases} releases: {f.job.reason}")
    return Finding("held", f"Slurm holds job {f.job.job_id}: {f.job.reason}", Fix.RELEASE)


def lost(f: Facts, limits: Limits) -> Finding | None:
    """The run would go on, and nothing will start it."""
    if f.is_cancelled or not f.queue_known or f.mode in (None, "local", "salloc"):
        return None
    if f.was_replaced and f.state.is_over and f.state.state is not State.FINISHED:
        return _resumable(f, "its job did nothing and was ended; it was not started again")
    if f.state.state is State.INTERRUPTED:
        return _resumable(f, f.state.detail)
    if f.state.state is State.UNKNOWN and not f.has_job and f.waiting > limits.unavailable:
        # Somebody may have thought better of it: a person decides.
        return Finding("lost", "whoever submitted it did not come to a job; `stoker resume` submits it")
    if f.state.state is not State.FAILED or f.attempts == 0:
        return None
    if f.outcome is None:
        is_hopeless = f.job is not None and f.job.state in ("OUT_OF_MEMORY", "DEADLINE")
        return Finding("lost", f.state.detail) if is_hopeless else _resumable(f, f.state.detail)
    if f.outcome.next is Next.NOTHING and f.outcome.cause in SITE_S_DOING and f.continuation != "none":
        return _resumable(f, f"{f.outcome.cause.value}: {f.outcome.reason}")
    return None


def _resumable(f: Facts, text: str) -> Finding:
    if f.continuation == "none":
        return Finding("lost", f"{text} (resilience.continuation=none)")
    if f.resumes >= MOST_RESUMES:
        return Finding("lost", f"{text}; resumed {f.resumes} times by the watch without a step: see why")
    return Finding("lost", text, Fix.RESUME)


def headless(f: Facts, limits: Limits) -> Finding | None:
    """Slurm shows the job as running, and nothing of it does anything."""
    if f.state.state is not State.RUNNING or f.job is None or f.job.state != "RUNNING":
        return None
    where = f" (nodes: {f.node_states})" if f.node_states else ""
    if f.silent is not None and f.silent > limits.silence:
        text = f"job {f.job.job_id} is RUNNING, but nothing of it has reported for {duration(f.silent)}{where}"
        return Finding("headless", text, Fix.REPLACE)
    if f.starting is not None and f.starting > limits.starting:
        text = (
            f"job {f.job.job_id} runs for {duration(f.starting)} and its supervisor has not reported; see slurm/*.log"
        )
        return Finding("headless", text + where)
    return None


def chain_broken(f: Facts, limits: Limits) -> Finding | None:
    """A run that continues by chain and has no next job."""
    if f.continuation != "chain" or f.state.is_over or f.is_cancelled or f.has_successor is not False:
        return None
    if f.state.state is not State.RUNNING or f.outcome is not None or f.starting is not None:
        return None
    return Finding("chain", "no next job waits; when this one ends, the run stops until it is resumed (--fix does)")


def pending(f: Facts, limits: Limits) -> Finding | None:
    """It never starts as it is, or waits for long."""
    if f.job is None or f.job.state != "PENDING" or f.state.state not in (State.PENDING, State.REQUEUED):
        return None
    reason = re.split(r"[,(\s]", f.job.reason.strip("() "), maxsplit=1)[0]
    job = f"job {f.job.job_id} waits for {duration(f.waiting)}"
    if reason in _NEVER:
        return Finding("pending", f"{job} and cannot start: {f.job.reason} ({_NEVER[reason]})")
    if _PER_JOB.fullmatch(reason):
        return Finding("pending", f"{job} and cannot start: {f.job.reason} (one job alone is above the limit)")
    if reason in _UNAVAILABLE and f.waiting > limits.unavailable:
        return Finding("pending", f"{job}: {f.job.reason} (nodes that it asks for are down, drained or reserved)")
    if f.waiting > limits.pending:
        return Finding("pending", f"{job}: {f.job.reason}")
    return None


def stalled(f: Facts, limits: Limits) -> Finding | None:
    """Something of it lives, and no step gets done."""
    if f.state.state is not State.RUNNING or f.stalled is None or f.stalled <= limits.stalled:
        return None
    if f.silent is not None and f.silent > limits.silence:
        return None  # headless says more
    return Finding("stalled", f"it reports, but has done no step for {duration(f.stalled)}")


def fruitless(f: Facts, limits: Limits) -> Finding | None:
    """Starts over and over without getting anywhere."""
    if f.state.is_over or f.fruitless < 2:
        return None
    why = f"; the last one: {f.outcome.cause.value}: {f.outcome.reason}" if f.outcome else ""
    return Finding("fruitless", f"{f.fruitless} attempts in a row made no step{why}")


def alerts(f: Facts, limits: Limits) -> Finding | None:
    return None if f.state.is_over or not f.alerts else Finding("alert", "; ".join(f.alerts))


def disk(f: Facts, limits: Limits) -> Finding | None:
    """Storage on which the run is about to end."""
    if f.state.is_over or f.free is None:
        return None
    left = f"{f.free_bytes / 1e9:.1f} GB free for checkpoints"
    if f.checkpoint_bytes and f.free_bytes < limits.checkpoints * f.checkpoint_bytes:
        return Finding("disk", f"{left}; a checkpoint takes {f.checkpoint_bytes / 1e9:.1f} GB")
    return Finding("disk", f"{left} ({100 * f.free:.1f} %)") if f.free < limits.free else None


Check = Callable[[Facts, Limits], Finding | None]

# In this order; of two findings that `--fix` has an answer to, the first gets it.
CHECKS: tuple[Check, ...] = (
    held,
    lost,
    headless,
    chain_broken,
    pending,
    stalled,
    fruitless,
    alerts,
    disk,
)


def findings(f: Facts, limits: Limits = Limits()) -> list[Finding]:
    """All that is wrong with a run; empty when it is well."""
    return [found for check in CHECKS if (found := check(f, limits)) is not None]
