"""What a new run waits for: `stoker launch --after RUN_OR_JOB`, `--after-ok RUN_OR_JOB`.

Owns: from the names on the command line to sbatch's --dependency. It belongs to one submission and stays out of the
frozen script: Slurm forgets jobs, and a run that goes on later must not wait for one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..conf.slurm_jobid import parse_job_id
from . import slurm
from .cancel import learn_jobs
from .errors import UserError, environment_error
from .find import find_run
from .run.effective import effective_config
from .run.layout import RunDir
from .run.outcome import EXIT_FINISHED
from .run.submissions import submissions
from .state import look, queue_of


@dataclass(frozen=True)
class After:
    dependency: str | None  # as sbatch takes it; None: nothing to wait for
    notes: tuple[str, ...]  # for people


def dependencies(after: Sequence[str], after_ok: Sequence[str]) -> After:
    """What to wait for: `after` until it is over, `after_ok` until it has succeeded. All of them.

    A run stands for its newest job: of a chain, the successor that is in the queue. What is over (and has succeeded,
    for `after_ok`) need not be waited for.

    Raises:
        UserError: a text names nothing, has no job, or has ended in another way than `after_ok` wants.
    """
    notes: list[str] = []
    parts = []
    for kind, texts in (("afterany", after), ("afterok", after_ok)):
        jobs = [job for text in texts if (job := _job_to_wait_for(text, kind == "afterok", notes)) is not None]
        parts += [":".join([kind, *dict.fromkeys(jobs)])] if jobs else []
    return After(",".join(parts) or None, tuple(notes))


def _job_to_wait_for(text: str, must_succeed: bool, notes: list[str]) -> str | None:
    try:
        job_id = parse_job_id(text)
    except ValueError:
        return _job_of_run(find_run(text), text, must_succeed, notes)
    if not job_id.is_job or job_id.cluster is not None:
        raise UserError(f"{_option(must_succeed)} {text}: expected a job, a task of an array (12_3), or a run")
    return _job_known_to_slurm(text, must_succeed, notes)


def _option(must_succeed: bool) -> str:
    return "--after-ok" if must_succeed else "--after"


def _job_of_run(run: RunDir, text: str, must_succeed: bool, notes: list[str]) -> str | None:
    learn_jobs(run)
    found = submissions(run)
    state = look(run, queue_of([run]))
    if not found:
        raise UserError(f"{_option(must_succeed)} {text}: this run was never submitted")
    if state.is_over:
        _refuse_failure(text, must_succeed, state.exit_code == EXIT_FINISHED, state.state.value)
        notes.append(f"{text} is over ({state.state.value}); not waited for")
        return None
    continues_by_chain = effective_config(run, found[-1].number)["resilience"]["continuation"] == "chain"
    if continues_by_chain and must_succeed:
        raise UserError(
            f"--after-ok {text}: it continues by a chain of jobs, whose last one is cancelled when the run has "
            "succeeded, and Slurm would never start what waits for the success of that; use --after"
        )
    # A successor that is not accepted yet, or is withdrawn, is nothing to wait for: the job before it is.
    newest = [s for s in found if not (s.mode == "chain" and (s.job_id is None or s.is_cancelled))][-1:]
    job_id = newest[0].job_id if newest else None
    if job_id is None:
        raise UserError(
            f"{_option(must_succeed)} {text}: its job is not known ({state.state.value}); Slurm can wait for jobs only"
        )
    if continues_by_chain:
        notes.append(
            f"{text} continues by a chain of jobs: {job_id}, the newest of them, is waited for; "
            "not those that may follow when it has started"
        )
    return job_id


def _job_known_to_slurm(job_id: str, must_succeed: bool, notes: list[str]) -> str | None:
    """Slurm itself takes any number, and starts at once (or never) what waits for a job that it has forgotten."""
    jobs = slurm.squeue([job_id])
    if jobs is None:
        raise environment_error(f"{_option(must_succeed)} {job_id}: Slurm does not answer")
    if not jobs:
        raise UserError(
            f"{_option(must_succeed)} {job_id}: Slurm knows no such job; if it ended long ago, leave this out"
        )
    if not all(job.is_over for job in jobs):
        return job_id
    _refuse_failure(job_id, must_succeed, all(job.state == "COMPLETED" for job in jobs), jobs[0].state)
    notes.append(f"job {job_id} is over ({jobs[0].state}); not waited for")
    return None


def _refuse_failure(text: str, must_succeed: bool, has_succeeded: bool, state: str) -> None:
    if must_succeed and not has_succeeded:
        raise UserError(f"{_option(True)} {text}: it is over and did not succeed ({state}); nothing to wait for")
