"""What a job can learn of itself from Slurm: why it was signalled, when it ends. One RPC each, never in a loop.

Owns: `scontrol show job` parsed into a fate, the controller's clock beside ours, and `scontrol requeue`. Standard
library only: it runs on the batch host.
"""

from __future__ import annotations

import calendar
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from . import slurm_text
from .job_fate import JobFate
from .run.outcome import Cause

_NONE = {"", "None", "N/A", "Unknown", "(null)", "Invalid"}
_AS_OF = re.compile(r"Configuration data as of (\S+)")
TIMEOUT = 15.0  # seconds for one Slurm command


@dataclass(frozen=True)
class JobInfo:
    """Fields of `scontrol show job`.

    `clock`: the controller's Unix time minus our monotonic clock. Its times are its own clock's, which may be minutes
    from this node's. RunTime does not help: scontrol works it out with the clock of the node it runs on.
    """

    fields: dict[str, str]
    clock: float | None = None
    # Of a job that Slurm starts again or lost a node of (heard.py):
    why: Cause | None = None
    down: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        return self.fields.get("JobState", "")

    def time(self, name: str) -> float | None:
        """A time field as Unix seconds of the controller's, None if it is not set. We have scontrol print UTC."""
        return _unix(self.fields.get(name, ""))

    @property
    def ends_at(self) -> float | None:
        """When the allocation ends, by this machine's monotonic clock; None: no limit, or not known."""
        end = self.time("EndTime")
        if end is None:
            return None
        return end - (time.time() - time.monotonic() if self.clock is None else self.clock)

    @property
    def seconds_left(self) -> float | None:
        """Until the allocation's end, from now."""
        return None if self.ends_at is None else self.ends_at - time.monotonic()

    @property
    def evidence(self) -> dict[str, str]:
        names = ("JobState", "Reason", "Restarts", "Requeue", "PreemptTime", "EndTime", "NodeList", "ExitCode")
        return {n: self.fields[n] for n in names if n in self.fields}


def _unix(text: str) -> float | None:
    if text in _NONE:
        return None
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


def parse(text: str, clock: float | None = None) -> JobInfo:
    """The first record of `scontrol show job`."""
    return JobInfo(next(iter(slurm_text.records(text, "JobId")), {}), clock)


_LIVE = {"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "CONFIGURING", "RESIZING", "STAGE_OUT"}
_ENDED = {"CANCELLED", "PREEMPTED", "COMPLETING", "COMPLETED", "FAILED", "DEADLINE", "REVOKED", "BOOT_FAIL"}
_REQUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}


_BATCH_ENDED = ("JobLaunchFailure", "NonZeroExitCode", "RaisedSignal")  # reasons; scancel gives none


def fate(info: JobInfo, restarts: int) -> JobFate:
    """Why a job in this state is being signalled. `restarts`: SLURM_RESTART_COUNT as this attempt started with it.

    While processes are being killed Slurm may show COMPLETING and nothing else: then the restart count, which a requeue
    raises at once, and the reason tell what is under way.
    """
    states = set(info.state.replace("+", ",").split(","))
    if int(info.fields.get("Restarts", restarts)) > restarts or states & _REQUEUED:
        return JobFate.REQUEUED
    reason = info.fields.get("Reason", "")
    if "TIMEOUT" in states or ("COMPLETING" in states and reason == "TimeLimit"):
        return JobFate.TIME_LIMIT
    if "NODE_FAIL" in states or ("COMPLETING" in states and reason == "NodeDown"):
        return JobFate.NODE_FAIL
    if states & {"PREEMPTED", "COMPLETING"} and info.time("PreemptTime") is not None:
        return JobFate.TAKEN
    if states & _ENDED and "CANCELLED" not in states and reason.startswith(_BATCH_ENDED):
        return JobFate.ENDED
    if states & _ENDED:
        # Slurm does not start it again, so nor do we.
        return JobFate.CANCELLED
    # Preempted, and in its grace. Slurm may show that under passing states (SIGNALING) instead of RUNNING.
    if info.time("PreemptTime") is not None:
        return JobFate.PREEMPTED
    return JobFate.RUNNING if states & _LIVE else JobFate.UNKNOWN


def slurm_name(environ: Mapping[str, str]) -> str:
    """The own job as scontrol takes it: an array's tasks have ids of their own that mean the whole array to it."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"]


def query(job_id: str, clock: float | None = None) -> JobInfo | None:
    """None if Slurm does not answer, or scontrol is not here."""
    done = command(["scontrol", "show", "job", job_id])
    return parse(done.stdout, clock) if done is not None and done.returncode == 0 else None


GONE = "GONE"  # no state of Slurm's: it knows no such job (any more)


def state_of(job_id: str) -> str | None:
    """The state of some other job, or GONE; None if Slurm does not answer, or scontrol is not here."""
    done = command(["scontrol", "show", "job", job_id])
    if done is None:
        return None
    if done.returncode != 0:
        return GONE if "Invalid job id" in done.stderr else None
    return parse(done.stdout).state


def controller_clock() -> float | None:
    """The controller's Unix time minus our monotonic clock, at most a second (and the RPC's time) too large, so that
    ends come out early rather than late. None if Slurm does not answer.

    `scontrol show config` begins with the time at which the controller answered (22.05 to 25.05).
    """
    asked = time.monotonic()
    done = command(["scontrol", "show", "config"])
    found = _AS_OF.match(done.stdout) if done is not None and done.returncode == 0 else None
    now = _unix(found[1]) if found else None
    return None if now is None else now + 1.0 - asked


class Inquirer:
    """`query` that asks for the controller's clock along with the first question, and keeps it."""

    def __init__(self) -> None:
        self._clock: float | None = None

    def __call__(self, job_id: str) -> JobInfo | None:
        info = query(job_id, self._clock)
        if info is None or self._clock is not None:
            return info
        self._clock = controller_clock()
        return JobInfo(info.fields, self._clock)


def requeue(
    job_id: str, restarts: int, patience: float = 600.0, is_wanted: Callable[[], bool] = lambda: True
) -> str | None:
    """Ask Slurm to requeue our own job; SIGTERM to all of it follows. Returns an error, None if it starts again.

    A controller that is busy or away is asked again for `patience` seconds, as long as `is_wanted`.
    """
    if shutil.which("scontrol") is None:
        return "scontrol is not installed on this node"
    began, pause = time.monotonic(), 1.0
    while True:
        done = command(["scontrol", "requeue", job_id])
        if done is not None and done.returncode == 0:
            return None
        # An answer may be lost though the request was heard.
        info = query(job_id)
        now = fate(info, restarts) if info is not None else JobFate.UNKNOWN
        if now is JobFate.REQUEUED:
            return None
        if now is JobFate.CANCELLED:
            return CANCELLED
        if now is JobFate.TAKEN:
            return TAKEN
        error = "no answer" if done is None else done.stderr.strip() or f"exit code {done.returncode}"
        if any(word in error for word in _FINAL):
            return error
        if time.monotonic() + pause - began > patience or not is_wanted():
            return f"scontrol requeue did not get through in {time.monotonic() - began:.0f} s (last: {error})"
        time.sleep(pause)
        pause = min(2 * pause, 10.0)


CANCELLED = "the job was cancelled"
TAKEN = "Slurm ends preempted jobs here (PreemptMode=CANCEL)"
# Words of a refusal that asking again does not change; the rest is a controller that is busy or away.
_FINAL = ("Invalid", "disabled", "denied", "not permitted", "cannot be requeued")


# Slurm answers a requeue with SIGTERM to all processes of the job, and its own command is one of them.
SHIELDED = ("sh", "-c", "trap '' TERM INT HUP; exec \"$@\"", "sh")


def command(
    argv: Sequence[str], timeout: float = TIMEOUT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run a Slurm command inside the job; None if it is not here, or does not end in time.

    `env`: taken as it is. sbatch hands it to a job, which has a time zone of its own.
    """
    try:
        return subprocess.run(
            [*SHIELDED, *argv],
            env={**os.environ, "SLURM_TIME_FORMAT": "standard", "TZ": "UTC0"} if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
