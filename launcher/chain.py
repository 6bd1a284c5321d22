"""Chain mode: one successor job waits in the queue behind the running one, where Slurm may not requeue.

Owns: submitting it (exactly once, off the supervisor's loop), finding it again, amending and withdrawing it. The
successor is a submission of its own (mode `chain`, `after`: the running job). Standard library only.
"""

from __future__ import annotations

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
_ENDED_WAITING = {"CANCELLED", "COMPLETED", "FAILED", "REVOKED", "DEADLINE"}  # of a successor that never ran
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
        self.error: str | None = None
        self._settled = threading.Event()  # accepted, or refused at least once
        self._hurry = threading.Event()
        self._is_over = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Have one submitted; returns at once."""
        self._thread = threading.Thread(target=self._work, name="chain", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        pause = _FIRST_PAUSE
        while not self._is_over:
            try:
                self._submit()
                self.error = None
                return
            except (SubmissionError, UserError, OSError, ValueError) as e:
                is_new, self.error = self.error is None, " ".join(str(e).split())
                if is_new:
                    self.events.write("chain_broken", error=self.error)
                if self.next is not None and not getattr(e, "may_be_queued", False):
                    self._note_refusal(self.error)
            finally:
                self._settled.set()
            self._hurry.wait(pause)
            self._hurry.clear()
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _note_refusal(self, error: str) -> None:
        assert self.next is not None
        try:
            self.next.refuse(error)
        except OSError:
            return

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
        info = jobinfo.query(found.job_id)
        return None if info is not None and info.state in _ENDED_WAITING else found

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
        return submit(request, sleep=self._sleep, sbatch=_sbatch).job_id

    def _sleep(self, seconds: float) -> None:
        self._hurry.wait(seconds)

    # The end of the attempt.

    def wait(self, seconds: float) -> None:
        """Until a successor is accepted, or refused once more."""
        if self.error is not None:
            self._settled.clear()
            self._hurry.set()
        self._settled.wait(seconds)

    def go_on(self, changes: Mapping[str, str], seconds: float) -> str | None:
        """Leave it to the successor, changed as `jobnodes.amend` takes it. Returns why nothing will follow, or None."""
        self.wait(seconds)
        if self.error is not None or self.next is None or self.next.job_id is None:
            return f"no successor was accepted ({self.error or 'sbatch has not answered'})"
        info = jobinfo.query(self.next.job_id)
        if self.next.is_cancelled or (info is not None and info.state in _ENDED_WAITING):
            return f"{GONE} (job {self.next.job_id})"
        error = jobnodes.amend(self.next.job_id, changes)
        if error is not None:
            self.events.write("amend_failed", job=self.next.job_id, changes=dict(changes), error=error)
        return None

    def stop(self, seconds: float = 20.0) -> None:
        """The run is over: take the successor out of the queue. The marker comes first, so that it cannot start."""
        self._is_over = True
        found = self.next or successor_of(self.own.run, self.job_id)
        if found is not None:
            self._withdraw(found)
        self._hurry.set()
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


def predecessor_was_cancelled(after: str, query: Callable[[str], Any] = jobinfo.query) -> bool:
    """Whether somebody cancelled the job before this one, which had no time to say so."""
    info = query(after)
    return info is not None and info.state == "CANCELLED"
