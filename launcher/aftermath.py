"""`python -m stoker.launcher.aftermath RUN_DIR CODE [--local]`: the last word for a supervisor that could not say it.

It was killed, raised an exception, or ended before it took an attempt. Owns: that outcome, and what follows from it.
Started by the batch script, which outlives the supervisor. Standard library only.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from typing import Any

from . import jobinfo
from .continuation import Continuation
from .job_fate import JobFate
from .protocol import SUBMISSION
from .run.attempts import claim
from .run.effective import effective_config
from .run.events import EventLog
from .run.files import create_json, read_json
from .run.layout import AttemptDir, RunDir, open_run
from .run.outcome import EXIT_CANCELLED, EXIT_FAILED, EXIT_REQUEUE, Cause, Next, Outcome
from .run.submissions import Submission, own_submission, rival, series, submissions
from .signals import SignalPipe
from .state import attempts_of
from .summary import tail_records
from .supervise_start import end_already


def main(argv: list[str]) -> int:
    SignalPipe()  # Slurm answers a requeue with SIGTERM to us, too
    run, code = open_run(argv[0]), int(argv[1])
    job_id = None if "--local" in argv[2:] else os.environ.get("SLURM_JOB_ID")
    token = os.environ.get(SUBMISSION)
    if job_id and token and rival(run, job_id, token):
        return code
    own = own_submission(run, job_id, token) if job_id else submissions(run)[-1]
    mine = series(submissions(run), upto=own.number)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    batch_id = jobinfo.slurm_name(os.environ) if job_id is not None and own.mode != "salloc" else None
    attempt, fate = _begun(run, mine, job_id, restarts), _fate(batch_id, restarts)
    has_begun = attempt is not None
    if attempt is None:
        if job_id is None or not _may_begin(run, mine, fate):
            return code
        attempt = _begin(run, own, job_id, restarts)
    elif (said := Outcome.seen(attempt)) is not None:
        return said.exit_code  # it ended in order; a signal in that moment cost the shell its exit code
    elif attempt.outcome.exists() or attempt.number != run.all_attempts()[-1].number:
        return code
    config = effective_config(run, own.number)
    events = EventLog(attempt.events("aftermath"), "aftermath", attempt.number)
    continuation = Continuation(run, attempt, mine, config, batch_id, restarts, events)
    outcome = outcome_of(code, config, own.is_cancelled, fate, batch_id is not None, has_begun, _failure(attempt))
    outcome = continuation.plan(outcome, is_ours=True)
    continuation.begin()
    outcome = continuation.bring_about(outcome, True, None)
    outcome.write(attempt)
    events.write("attempt_ended", cause=outcome.cause.value, next=outcome.next.value, reason=outcome.reason)
    print(f"stoker: {outcome.reason} (next: {outcome.next.value})", flush=True)
    return outcome.exit_code


def _begun(run: RunDir, mine: list[Submission], job_id: str | None, restarts: int) -> AttemptDir | None:
    """The attempt that this start of the job took, None if it did not come to that."""
    for attempt in reversed(attempts_of(run, *mine)):
        try:
            start = read_json(attempt.start)
        except (FileNotFoundError, ValueError):
            start = {"job_id": job_id, "restart_count": restarts}  # it was killed before it could say
        if (start.get("job_id"), start.get("restart_count")) == (job_id, restarts):
            return attempt
    return None


def _may_begin(run: RunDir, mine: list[Submission], fate: JobFate) -> bool:
    """Whether an attempt is to be made of a start that came to none, so that it counts and something follows."""
    if fate in (JobFate.CANCELLED, JobFate.REQUEUED) or end_already(run, mine) is not None:
        return False
    newest = run.all_attempts()[-1:]
    is_at_work = bool(newest) and not newest[0].outcome.exists() and newest[0] not in attempts_of(run, *mine)
    return not is_at_work  # another job may be


def _begin(run: RunDir, own: Submission, job_id: str, restarts: int) -> AttemptDir:
    attempt = claim(run)
    record = {"job_id": job_id, "restart_count": restarts, "nodes": os.environ.get("SLURM_JOB_NODELIST", "")}
    record |= {"host": socket.gethostname(), "submission": own.number, "time": time.time()}
    create_json(attempt.start, record)
    return attempt


def _failure(attempt: AttemptDir) -> dict[str, Any] | None:
    """What the supervisor said of an exception that ended it."""
    try:
        said = tail_records(attempt.events("supervisor"))
    except OSError:
        return None
    return next((r for r in said if r.get("event") == "supervisor_failed"), None)


def _fate(job_id: str | None, restarts: int) -> JobFate:
    info = None if job_id is None else jobinfo.query(job_id)
    return JobFate.RUNNING if info is None else jobinfo.fate(info, restarts)


def outcome_of(
    code: int,
    config: dict[str, Any],
    is_cancelled: bool,
    fate: JobFate,
    is_batch: bool,
    has_begun: bool = True,
    failure: dict[str, Any] | None = None,
) -> Outcome:
    """What follows when a supervisor ended with this exit status of a shell (128 + signal), and the job lives on."""
    try:
        how = signal.Signals(code - 128).name
    except ValueError:
        how = f"exit code {code}"
    reason = f"the supervisor was ended by {how}" + ("" if has_begun else " before it could begin")
    if failure is not None:
        reason = f"the supervisor failed: {failure.get('error')}"
    if is_cancelled or fate is JobFate.CANCELLED:
        return Outcome(Cause.CANCELLED, Next.NOTHING, EXIT_CANCELLED, f"{reason} while the run was being cancelled")
    cause = Cause.CRASH if has_begun else Cause.LAUNCH_FAILED
    traceback = str(failure["traceback"]) if failure and failure.get("traceback") else None
    continuation = config["resilience"]["continuation"]
    if continuation == "none":
        return Outcome(cause, Next.NOTHING, EXIT_FAILED, reason, traceback=traceback)
    onward = Next.CHAIN if is_batch and continuation == "chain" else Next.REQUEUE
    return Outcome(cause, onward, EXIT_REQUEUE, reason, traceback=traceback)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
