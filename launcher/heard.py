"""What Slurm says, as events for the policy: why we were signalled, how long there is, what became of nodes.

Owns: asking for the evidence (in the desk's thread) and reading answers. Besides `scontrol show job` it looks into the
batch script's own log, where Slurm's step daemon writes the reason of a kill ("DUE TO PREEMPTION"), and asks sinfo for
nodes that went down. Decides nothing. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from . import jobinfo, jobnodes
from . import policy_types as p
from .desk import Question
from .jobinfo import JobInfo
from .run.outcome import Cause

_DUE = re.compile(rb"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO ([A-Z ]+)")
_CAUSES = {
    b"PREEMPTION": Cause.PREEMPTED,
    b"JOB REQUEUE": Cause.REQUEUED,
    b"NODE FAILURE": Cause.NODE_FAILURE,
    b"TIME LIMIT": Cause.TIME_LIMIT,
}
_LOG_END = 1 << 16  # bytes of the log that are looked through


@dataclass(frozen=True)
class OwnJob:
    """What is known of the job at its start. Of `log`, to which requeues append, what follows `log_start` is ours."""

    job_id: str
    restarts: int
    nodes: str  # host list
    log: Path
    log_start: int = 0

    @staticmethod
    def of(job_id: str, restarts: int, nodes: str, log: Path) -> OwnJob:
        try:
            start = log.stat().st_size
        except OSError:
            start = 0
        return OwnJob(job_id, restarts, nodes, log, start)


_TAKEN_AWAY = (p.JobFate.REQUEUED, p.JobFate.NODE_FAIL, p.JobFate.TAKEN)


def inquire(job: OwnJob, ask: Callable[[str], JobInfo | None]) -> JobInfo | None:
    """Ask about our own job; more when Slurm has taken it from us. None: no answer."""
    info = ask(job.job_id)
    if info is None or jobinfo.fate(info, job.restarts) not in _TAKEN_AWAY:
        return info
    return replace(info, why=why_in_log(job), down=jobnodes.down_among(job.nodes) if job.nodes else ())


def why_in_log(job: OwnJob) -> Cause | None:
    """The reason that Slurm's step daemon gave for the end of this attempt, None if it gave none."""
    try:
        with open(job.log, "rb") as f:
            end = f.seek(0, 2)
            f.seek(max(job.log_start, end - _LOG_END))
            found = _DUE.findall(f.read())
    except OSError:
        return None
    return _CAUSES.get(found[-1].strip()) if found else None


def events_of(
    question: Question, info: JobInfo | None, restarts: int, warning: float, since_warned: float
) -> list[p.Event]:
    """What an answer means. `warning`: lead of the warning signal; `since_warned`: seconds since it came."""
    fate = jobinfo.fate(info, restarts) if info else p.JobFate.UNKNOWN
    left, evidence = (info.seconds_left, info.evidence) if info else (None, {})
    why, down = (info.why, info.down) if info else (None, ())
    if info is not None and fate is p.JobFate.TAKEN and why is not Cause.PREEMPTED and info.state == "COMPLETING":
        fate = p.JobFate.CANCELLED  # somebody cancelled it in its grace time
    # Slurm sends the same signal before the time limit and at a preemption, and both move the end near.
    is_preempted = info is not None and info.time("PreemptTime") is not None
    cause, what = (Cause.PREEMPTED, "preempted") if is_preempted else (Cause.TIME_LIMIT, "the time limit is near")
    match question.about:
        case "clock" if left is None or left < warning:
            return [p.Warned(cause, what, left)]
        case "warning":
            # Slurm does not answer: the lead that was asked for, from when the warning came.
            left = warning - since_warned if info is None else left
            return [p.Warned(cause, f"{what} ({question.by})", left)]
        case "terminated":
            return [p.Terminated(fate, question.by, left, evidence, why, down)]
        case "launch":
            return [p.SlurmSaid(fate, evidence, why, down)]
    return []
