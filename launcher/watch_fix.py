"""What `stoker watch --fix` does about a finding, safely: never twice, and never to a run that a person has stopped.

Owns: the actions. Two watchers may come to one run at once, and one may die in the middle: who resumes a run takes the
submission number that its facts were gathered for (run/submissions.py), and what was begun is noted before it is done.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator

from . import slurm
from .cancel import live_jobs, poll
from .errors import UserError, environment_error
from .resume import CLEARING, resume
from .run.files import create_json, read_json
from .run.layout import RunDir
from .run.submissions import Submission, is_called_off, series, submissions
from .state import cluster_of
from .watch_checks import Facts, Fix
from .watch_facts import release_marks, release_path, replaced_path

NAME = "watch"  # in the record of what it submits


def apply(fix: Fix, run: RunDir, facts: Facts) -> str:
    """Do it; says in one sentence what was done.

    Raises:
        UserError: it could not be done, or need not be any more; says why.
    """
    found = submissions(run)
    if not found or found[-1].number != facts.submission:
        raise environment_error("somebody else has submitted it meanwhile")
    links = series(found)
    if is_called_off(links):
        raise environment_error("it was cancelled meanwhile")
    job_id = facts.job.job_id if facts.job else None
    return _ACTIONS[fix](run, next((s for s in links if s.job_id == job_id), links[-1]), facts)


def _release(run: RunDir, submission: Submission, facts: Facts) -> str:
    assert facts.job is not None
    number = len(release_marks(submission)) + 1
    if not create_json(release_path(submission, number), {"job_id": facts.job.job_id, "reason": facts.job.reason}):
        raise environment_error("somebody else is just releasing it")
    reply = slurm.release(facts.job.job_id, cluster_of(submission))
    if reply.code != 0:
        raise environment_error(f"scontrol release {facts.job.job_id}: {' '.join(reply.err.split()) or 'no answer'}")
    return f"released job {facts.job.job_id}"


def _resume(run: RunDir, submission: Submission, facts: Facts) -> str:
    job_id = submission.job_id
    if job_id and facts.job is None and not facts.was_replaced and slurm.was_cancelled(job_id, cluster_of(submission)):
        raise environment_error(f"job {job_id} was cancelled by scancel; `stoker resume` starts it again")
    with environment_of_launch(run), contextlib.redirect_stdout(io.StringIO()) as said:
        resume(run, [], by=NAME, number=facts.submission + 1)
    return f"resumed: {' '.join(said.getvalue().split('job:')[-1].split()) or 'submitted'}"


@contextlib.contextmanager
def environment_of_launch(run: RunDir) -> Iterator[None]:
    """What env.json recorded of the launch's environment, in place of ours: Slurm gives the job the submitter's, and
    cron's has neither the PATH nor the libraries that the run was launched with. Keys are not recorded."""
    try:
        variables = dict(read_json(run.env)["variables"])
    except (OSError, ValueError, KeyError, TypeError):
        variables = {}
    variables.pop("HOSTNAME", None)
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _replace(run: RunDir, submission: Submission, facts: Facts) -> str:
    assert facts.job is not None
    job_id = facts.job.job_id
    create_json(replaced_path(submission), {"job_id": job_id, "silent": facts.silent})
    live = live_jobs(
        submissions(run)
    )  # of a chain also the next one: it would not go on after a job that was cancelled
    reply = slurm.scancel([s.job_id or "" for s in live] or [job_id], cluster_of(submission))
    if reply.code != 0 and "Invalid job id" not in reply.err:
        raise environment_error(f"scancel {job_id}: {' '.join(reply.err.split()) or 'no answer'}")
    if not poll(lambda: not live_jobs(live), CLEARING):
        raise environment_error(f"job {job_id} was cancelled and does not end; the next look goes on")
    return f"ended job {job_id}; {_resume(run, submission, facts)}"


_ACTIONS: dict[Fix, Callable[[RunDir, Submission, Facts], str]] = {
    Fix.RELEASE: _release,
    Fix.RESUME: _resume,
    Fix.REPLACE: _replace,
}


def try_to(fix: Fix, run: RunDir, facts: Facts) -> tuple[bool, str]:
    """(whether it was done, what was done or why not). Never raises for one run's sake: there are others."""
    try:
        return True, apply(fix, run, facts)
    except (UserError, ValueError, OSError) as e:
        return False, " ".join(str(e).split())
