"""`python -m stoker.launcher.aftermath RUN_DIR CODE [--local]`: the last word for a supervisor that was killed.

Owns: that outcome, and what follows from it. Started by the batch script, which outlives the supervisor. Standard
library only.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from . import jobinfo
from .continuation import Continuation
from .policy_types import JobFate
from .run.effective import effective_config
from .run.events import EventLog
from .run.layout import AttemptDir, RunDir, open_run
from .run.outcome import EXIT_CANCELLED, EXIT_FAILED, EXIT_REQUEUE, Cause, Next, Outcome
from .run.submissions import own_submission, series, submissions
from .signals import SignalPipe
from .state import attempts_of, submission_of


def main(argv: list[str]) -> int:
    SignalPipe()  # Slurm answers a requeue with SIGTERM to us, too
    run, code = open_run(argv[0]), int(argv[1])
    job_id = None if "--local" in argv[2:] else os.environ.get("SLURM_JOB_ID")
    own = own_submission(run, job_id) if job_id else submissions(run)[-1]
    mine = series(submissions(run), upto=own.number)
    attempt = _unended(run, own.number, attempts_of(run, *mine))
    if attempt is None:
        return code
    config = effective_config(run, own.number)
    events = EventLog(attempt.events("aftermath"), "aftermath", attempt.number)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    batch_id = jobinfo.slurm_name(os.environ) if job_id is not None and own.mode != "salloc" else None
    continuation = Continuation(run, attempt, mine, config, batch_id, restarts, events)
    outcome = outcome_of(code, config, own.is_cancelled, _fate(batch_id, restarts), batch_id is not None)
    outcome = continuation.plan(outcome, is_ours=True)
    continuation.begin()
    outcome = continuation.bring_about(outcome, True, None)
    outcome.write(attempt)
    events.write("attempt_ended", cause=outcome.cause.value, next=outcome.next.value, reason=outcome.reason)
    print(f"stoker: {outcome.reason} (next: {outcome.next.value})", flush=True)
    return outcome.exit_code


def _unended(run: RunDir, submission: int, attempts: list[AttemptDir]) -> AttemptDir | None:
    """The attempt that this job was at, if it left no word."""
    newest = attempts[-1] if attempts else None
    if newest is None or newest.outcome.exists() or submission_of(newest) not in (submission, None):
        return None
    return newest if run.all_attempts()[-1].number == newest.number else None


def _fate(job_id: str | None, restarts: int) -> JobFate:
    info = None if job_id is None else jobinfo.query(job_id)
    return JobFate.RUNNING if info is None else jobinfo.fate(info, restarts)


def outcome_of(code: int, config: dict[str, Any], is_cancelled: bool, fate: JobFate, is_batch: bool) -> Outcome:
    """What follows when a supervisor ended with this exit status of a shell (128 + signal), and the job lives on."""
    try:
        how = signal.Signals(code - 128).name
    except ValueError:
        how = f"exit code {code}"
    reason = f"the supervisor was ended by {how}"
    if is_cancelled or fate is JobFate.CANCELLED:
        return Outcome(Cause.CANCELLED, Next.NOTHING, EXIT_CANCELLED, f"{reason} while the run was being cancelled")
    continuation = config["resilience"]["continuation"]
    if continuation == "none":
        return Outcome(Cause.CRASH, Next.NOTHING, EXIT_FAILED, reason)
    onward = Next.CHAIN if is_batch and continuation == "chain" else Next.REQUEUE
    return Outcome(Cause.CRASH, onward, EXIT_REQUEUE, reason)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
