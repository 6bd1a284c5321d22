"""Submission through submitit's Executor and Job interfaces, with nothing pickled.

Owns: StokerExecutor, which gives frozen runs to Slurm, and StokerJob, whose result is the run's outcome.json. Only
submitit's abstract core is used: its Slurm executor writes and reads pickles in the job and has a signal policy of
its own. How a job gets accepted exactly once is submit.py's.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core import core, utils

from . import avoid, slurm
from .process import ProcessId
from .run.effective import effective_config, effective_script
from .run.layout import RunDir, open_run
from .run.outcome import Outcome
from .run.submissions import Submission, new_submission, series, submissions
from .run.views import last_outcome
from .state import RunState, look, queue_of
from .submit import Request
from .submit import submit as submit_script
from .watch import wait_for_end


@dataclass(frozen=True)
class FrozenRun:
    """The one thing that StokerExecutor submits: a run directory that exists. Calling it is not for this process."""

    path: Path
    submission: Submission | None = None  # made beforehand by `stoker resume`, which writes files for it

    def __call__(self) -> Outcome:
        raise RuntimeError("a frozen run is worked on by its supervisor; use `stoker run` for the foreground")


class QueueWatcher(core.InfoWatcher):
    """Job states from one squeue call for all jobs; works without accounting."""

    def update(self) -> None:
        self._num_calls += 1
        jobs = slurm.squeue(self._registered)
        if jobs is not None:
            self._info_dict = {job.job_id: {"State": job.state, "Reason": job.reason} for job in jobs}
        self._last_status_check = time.time()

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """UNKNOWN once Slurm has forgotten the job: the run's files know more."""
        return self.get_info(job_id, mode=mode).get("State", "UNKNOWN")


class StokerJob(core.Job[Outcome]):
    """A submitted run. `folder` is its run directory."""

    _cancel_command = "scancel"
    watcher = QueueWatcher()

    @property
    def run(self) -> RunDir:
        return open_run(self._paths.folder)

    @property
    def state(self) -> str:
        """The run's state in stoker's words (state.State), not only the job's in Slurm's."""
        return self._look().state.value

    def done(self, force_check: bool = False) -> bool:
        """Whether nothing will happen any more without a person; a requeued job is not done."""
        return self._look().is_over

    def wait(self) -> None:
        wait_for_end(self.run)

    def cancel(self, check: bool = True) -> None:
        """Stop the run for good: the marker first, so that nothing of it rises again."""
        for submission in series(submissions(self.run)):
            submission.cancel("StokerJob.cancel")
        super().cancel(check)

    def results(self) -> list[Outcome]:
        """Waits; the outcome of the last attempt.

        Raises:
            UncompletedJobError: the run ended without an outcome; says what is known.
        """
        found = wait_for_end(self.run)
        last = last_outcome(self.run)
        if last is None or last[1] is None:
            raise utils.UncompletedJobError(f"{self.run.path}: {found.state.value} {found.detail}")
        return [last[1]]

    def exception(self) -> utils.UncompletedJobError | None:
        try:
            outcome = self.results()[0]
        except utils.UncompletedJobError as e:
            return e
        if outcome.exit_code == 0:
            return None
        return utils.FailedJobError(f"{outcome.cause.value}: {outcome.reason}\n{outcome.traceback or ''}".strip())

    def submission(self) -> utils.DelayedSubmission:
        raise RuntimeError("nothing is pickled for a run; its config.json and code.tar.gz say what was submitted")

    def _look(self) -> RunState:
        return look(self.run, queue_of([self.run]))


class StokerExecutor(core.Executor):
    """Submits frozen runs: `StokerExecutor(root).submit(FrozenRun(path))`.

    Several in one `batch()` are submitted one after the other, each a job of its own.
    """

    job_class = StokerJob

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)

    @classmethod
    def affinity(cls) -> int:
        return 2 if slurm.is_available() else -1

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        """Raises SubmissionError if Slurm refuses or does not answer, TypeError for anything but a FrozenRun."""
        runs = []
        for delayed in delayed_submissions:
            if not isinstance(delayed.function, FrozenRun) or delayed.args or delayed.kwargs:
                raise TypeError(f"only frozen runs can be submitted, without arguments; found {delayed.function!r}")
            runs.append(delayed.function)
        return [self._submit(run) for run in runs]

    def _submit(self, frozen: FrozenRun) -> StokerJob:
        run = open_run(frozen.path)
        submission = frozen.submission or intend(run, options=avoid.options(run, effective_config(run)))
        config = effective_config(run, submission.number)
        script = effective_script(run, submission.number)
        intention = submission.intention
        others = frozenset(s.job_id for s in submissions(run) if s.job_id and s != submission)
        options = tuple(map(str, intention.get("options", ())))
        own_comment = config["cluster"].get("comment")
        request = Request(script, str(intention["token"]), own_comment, others, options)
        accepted = submit_script(request)
        submission.set_job(accepted.job_id, accepted.cluster)
        known = submission.job_id
        assert known is not None
        if known != accepted.job_id:
            # The first request came through after all and its job has started: it stays, the later one goes.
            slurm.scancel([accepted.job_id], accepted.cluster)
        return StokerJob(run.path, known)


def intend(run: RunDir, number: int | None = None, **fields: Any) -> Submission:
    """Note that the run is about to be submitted, with the token by which its job can be found.

    Of `fields`, `options` are sbatch's for this submission alone; they win over the script's.

    Raises:
        TakenError: there is a submission of this number.
    """
    process = ProcessId.own().record()  # who is at it, until the job is known
    return new_submission(run, "sbatch", number, token=secrets.token_hex(8), process=process, **fields)
