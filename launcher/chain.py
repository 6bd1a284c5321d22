"""Chain mode: one successor job waits in the queue behind the running one, where Slurm may not requeue.

Owns: submitting it (exactly once, off the supervisor's loop), finding it again, amending and withdrawing it. The
successor is a submission of its own (mode `chain`, `after`: the running job). Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import jobinfo, jobnodes, slurm
from .environment import without_outer_job
from .errors import UserError, environment_error
from .run.effective import effective_script
from .run.events import EventLog
from .run.submissions import AFTER, WITHDRAWN, Submission, new_submission, submissions, successor_of
from .submit import Request, SubmissionError, jobs_with, submit

BATCH = "STOKER_BATCH"  # process id of the batch script's shell, set by the script
_OF_THE_SCRIPT = (BATCH, AFTER, "STOKER_FAILED_STARTS")
_FIRST_PAUSE, _LONGEST_PAUSE = 30.0, 600.0  # seconds between two tries to have a successor accepted
# Of a successor that cannot go on. Slurm forgets a job some minutes after its end, so this one ended without a start.
_ENDED_WAITING = {"CANCELLED", "COMPLETED", "FAILED", "REVOKED", "DEADLINE", jobinfo.GONE}
GONE = "the successor is not in the queue any more"


class Chain:
    """The successor of one running job."""

    def __init__(
        self, submission: Submission, job_id: str, config: Mapping[str, Any], events: EventLog, exclude: str | None
    ) -> None:
        """`exclude`: the nodes that the successor is not to get, as far as they are known now."""
        self.own, self.job_id, self.config, self.events = submission, job_id, config, events
        self.exclude = exclude
        self.next: Submission | None = None
        self.error: str | None = None  # of the last try
        self._turn = threading.Condition()  # of what follows, and of `error`
        self._tries = 0  # that have ended
        self._wanted = 1  # tries that are not to be put off
        self._is_accepted = False
        self._is_over = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Have one submitted; returns at once."""
        self._thread = threading.Thread(target=self._work, name="chain", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        pause = _FIRST_PAUSE
        while not self._is_over:
            error = self._try()
            with self._turn:
                self.error, self._tries = error, self._tries + 1
                self._is_accepted = error is None
                self._turn.notify_all()
                if error is None:
                    return
                self._turn.wait_for(lambda: self._is_over or self._tries < self._wanted, pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _try(self) -> str | None:
        """Returns why there is no successor, None if there is one. Never raises: the thread must not end by that."""
        try:
            self._submit()
            return None
        except Exception as e:
            error = " ".join(str(e).split()) or type(e).__name__
            if self.error is None and not self._is_over:
                self.events.write("chain_broken", error=error)
            if self.next is not None and isinstance(e, UserError) and not getattr(e, "may_be_queued", False):
                with contextlib.suppress(OSError):
                    self.next.refuse(error)
            return error

    def _submit(self) -> None:
        """One try: find the successor that is there already, or send one.

        Raises:
            SubmissionError, UserError, OSError: there is none, as far as is known.
        """
        run = self.own.run
        if self.own.is_cancelled:
            self._is_over = True
            return
        self.next = self.next or self._found()
        is_new = self.next is None
        if self.next is None:
            self.next = new_submission(run, "chain", after=self.job_id, token=secrets.token_hex(8))
        if self.next.job_id is None:
            job = (None if is_new else self._look_up(self.next)) or self._send(self.next)
            self.next.set_job(job)
            self.events.write("successor", job=job, submission=self.next.number, exclude=self.exclude)
        if self._is_over or self.own.is_cancelled or self.next.is_cancelled:
            self._withdraw(self.next)

    def _found(self) -> Submission | None:
        """A successor from an earlier start of this job that can still go on."""
        found = successor_of(self.own.run, self.job_id)
        if found is None or found.is_cancelled:
            return None
        if found.job_id is None:
            return found if found.intention.get("token") else None
        return None if jobinfo.state_of(found.job_id) in _ENDED_WAITING else found

    def _look_up(self, submission: Submission) -> str | None:
        """The job of a successor whose answer was lost.

        Raises:
            SubmissionError: nobody can tell.
        """
        script = effective_script(submission.run, submission.number)
        jobs = jobs_with(str(submission.intention["token"]), script, self._known())
        if jobs is None:
            raise SubmissionError("Slurm does not say whether it took the successor", may_be_queued=True)
        return next((job.job_id for job in jobs if not job.is_over), None)

    def _known(self) -> frozenset[str]:
        found = (s.job_id for s in submissions(self.own.run))
        return frozenset((self.job_id, *(job for job in found if job)))

    def _send(self, submission: Submission) -> str:
        cluster = self.config["cluster"]
        options = [f"--dependency=afterany:{self.job_id}"]
        options += [f"--exclude={self.exclude}"] if self.exclude else []
        # The run has begun: `16:00` in the script would keep every further job of it waiting until then.
        options += ["--begin=now"] if cluster.get("begin") else []
        request = Request(
            effective_script(submission.run, submission.number),
            str(submission.intention["token"]),
            cluster.get("comment"),
            self._known(),
            tuple(options),
        )
        return submit(request, sleep=self._sleep, sbatch=self._sbatch).job_id

    def _sleep(self, seconds: float) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._is_over, seconds)

    def _sbatch(self, script: Path, options: Sequence[str], timeout: float, extra: Mapping[str, str]) -> slurm.Reply:
        if self._is_over:
            return slurm.Reply(1, "", "the run is over: not sent")
        return _sbatch(script, options, timeout, extra)

    # The end of the attempt.

    def wait(self, seconds: float) -> None:
        """Until a successor is accepted, or the next try (at once) has ended, too."""
        with self._turn:
            self._wanted = wanted = self._tries + 1
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._is_accepted or self._tries >= wanted, seconds)

    def go_on(self, changes: Mapping[str, str], seconds: float) -> str | None:
        """Leave it to the successor, changed as `jobnodes.amend` takes it. Returns why nothing will follow, or None."""
        self.wait(seconds)
        with self._turn:
            why = self.error or "sbatch has not answered"
        if not self._is_accepted or self.next is None or self.next.job_id is None:
            return f"no successor was accepted ({why})"
        if self.next.is_cancelled or jobinfo.state_of(self.next.job_id) in _ENDED_WAITING:
            return f"{GONE} (job {self.next.job_id})"
        error = jobnodes.amend(self.next.job_id, changes)
        if error is not None:
            self.events.write("amend_failed", job=self.next.job_id, changes=dict(changes), error=error)
        return None

    def stop(self, seconds: float = 20.0) -> None:
        """The run is over: take the successor out of the queue. The marker comes first, so that it cannot start."""
        with self._turn:
            self._is_over = True
            self._turn.notify_all()
        found = self.next or successor_of(self.own.run, self.job_id)
        if found is not None:
            self._withdraw(found)
        if self._thread is not None:
            self._thread.join(seconds)

    def _withdraw(self, submission: Submission) -> None:
        try:
            submission.cancel(WITHDRAWN)
        except OSError as e:
            self.events.write("withdrawal_failed", error=str(e))
        if submission.job_id is not None:
            jobinfo.command(["scancel", submission.job_id])
            self.events.write("successor_withdrawn", job=submission.job_id)


def _sbatch(script: Path, options: Sequence[str], timeout: float, extra: Mapping[str, str]) -> slurm.Reply:
    """As slurm.sbatch, from within the job: shielded, and with the environment that the job itself was given."""
    program = shutil.which("sbatch")
    if program is None:
        raise environment_error("sbatch is not installed on this node")
    env = {k: v for k, v in without_outer_job(batch_environment()).items() if k not in _OF_THE_SCRIPT}
    done = jobinfo.command([program, "--parsable", *options, str(script)], timeout, {**env, **extra})
    return slurm.Reply(None, "", "") if done is None else slurm.Reply(done.returncode, done.stdout, done.stderr)


def batch_environment() -> dict[str, str]:
    """The environment with which Slurm started the batch script: without what modules and set-up added to it since."""
    parent = os.getppid()
    if os.environ.get(BATCH) == str(parent):
        try:
            text = Path(f"/proc/{parent}/environ").read_bytes()
            return dict(os.fsdecode(item).split("=", 1) for item in text.split(b"\0") if b"=" in item)
        except OSError:
            pass
    return dict(os.environ)


def predecessor_was_cancelled(after: str, state_of: Callable[[str], str | None] = jobinfo.state_of) -> bool:
    """Whether somebody cancelled the job before this one, which had no time to say so."""
    return state_of(after) == "CANCELLED"
