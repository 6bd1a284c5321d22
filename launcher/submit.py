"""Getting a script accepted by Slurm exactly once, whatever happens to the answer.

Owns: the retry policy around sbatch. Each submission carries a unique token in the job's comment and starts a script of
its run; before anything is sent a second time, squeue is asked for such a job, until it answers. Should a first request
arrive later all the same, its job finds the token taken and ends (run/submissions.py). Standard library only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import slurm
from .errors import UserError
from .protocol import SUBMISSION
from .run.outcome import EXIT_FAILED

TRIES = 3
SBATCH_TIMEOUT = 60.0  # seconds; sbatch itself retries for MessageTimeout, 10 s by default
_LOOKUPS = (1.0, 3.0, 6.0)  # seconds to wait before each look for a job whose answer was lost
# The same while Slurm does not answer at all; with the commands' own time-outs that is about three minutes, enough for
# a controller that is restarted or moves to its backup.
_AWAY = (8.0,) * 10


class SubmissionError(UserError):
    """No job, or none that is known. `may_be_queued`: Slurm did not say whether it took the job."""

    def __init__(self, message: str, may_be_queued: bool) -> None:
        super().__init__(message, EXIT_FAILED)
        self.may_be_queued = may_be_queued


@dataclass(frozen=True)
class Accepted:
    job_id: str
    cluster: str | None


def comment_of(token: str, own_comment: str | None = None) -> str:
    """The job's comment: the user's, if any, and our token."""
    return f"{own_comment} stoker:{token}" if own_comment else f"stoker:{token}"


@dataclass(frozen=True)
class Request:
    """What is submitted, and by what its job is known again."""

    script: Path
    token: str
    own_comment: str | None = None
    others: frozenset[str] = frozenset()  # jobs known to belong to the run's other submissions
    options: tuple[str, ...] = ()  # of sbatch, for this submission alone


Sbatch = Callable[[Path, Sequence[str], float, Mapping[str, str]], slurm.Reply]


def submit(request: Request, sleep: Callable[[float], None] = time.sleep, sbatch: Sbatch = slurm.sbatch) -> Accepted:
    """Submit a script; returns the one job that was accepted. Waits for a controller that is away.

    Raises:
        SubmissionError: Slurm refused (its words are in the message), or did not answer.
        UserError: there is no sbatch here.
    """
    comment = comment_of(request.token, request.own_comment)
    for attempt in range(TRIES):
        mark = {SUBMISSION: request.token}
        reply = sbatch(request.script, [*request.options, f"--comment={comment}"], SBATCH_TIMEOUT, mark)
        known = slurm.parse_job_id(reply.out) if reply.code == 0 else None
        if known:
            job = Accepted(*known)
            if attempt:
                _cancel_others(request, job)
            return job
        if slurm.is_sure_refusal(reply):
            raise SubmissionError(f"sbatch refused the job: {_words(reply)}", may_be_queued=False)
        found = _look_up(request, sleep)
        if found:
            job = Accepted(found[0].job_id, None)
            _cancel_others(request, job)
            return job
        if found is None or reply.code == 0:
            break  # Slurm cannot be asked, or took the job and hides it: sending it again might double it
    text = f"Slurm did not say whether it took the job: {_words(reply)}"
    raise SubmissionError(text, may_be_queued=found is None or reply.code == 0)


def _look_up(request: Request, sleep: Callable[[float], None]) -> list[slurm.QueuedJob] | None:
    """The request's jobs; None if Slurm does not answer. Asks more than once: a slow controller may be at it still."""
    answered = False
    for number, wait in enumerate((*_LOOKUPS, *_AWAY)):
        if number >= len(_LOOKUPS) and answered:
            break
        sleep(wait)
        found = jobs_with(request.token, request.script, request.others)
        if found:
            return found
        if found is None and number == 0:
            print("stoker: Slurm does not answer; asking again for a few minutes", file=sys.stderr, flush=True)
        answered = answered or found is not None
    return [] if answered else None


def jobs_with(token: str, script: Path, others: frozenset[str] = frozenset()) -> list[slurm.QueuedJob] | None:
    """This user's jobs that carry a token, or start a run's script (sites rewrite comments); None: no answer.

    `others`: jobs with that script that are known to be somebody else's. A job that merely works in the run directory
    is the user's own affair.
    """
    jobs = slurm.squeue()
    if jobs is None:
        return None
    return [
        job
        for job in jobs
        if job.job_id not in others and (job.carries(token) or (not job.is_over and job.starts(script)))
    ]


def _cancel_others(request: Request, job: Accepted) -> None:
    """A first try that seemed lost may have arrived after all; two jobs on one run would fence each other out."""
    found = jobs_with(request.token, request.script, request.others) or []
    others = [other.job_id for other in found if other.job_id != job.job_id]
    if others:
        slurm.scancel(others)


def _words(reply: slurm.Reply) -> str:
    text = " ".join(f"{reply.err}\n{reply.out}".split())
    end = f"no answer within {SBATCH_TIMEOUT:.0f} s" if reply.code is None else f"exit code {reply.code}"
    return f"{text or 'it printed nothing'} ({end})"
