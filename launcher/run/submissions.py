"""Submissions: which Slurm jobs work on a run, and whether a person called them off.

    submissions/0001.json         intention, written before sbatch: time, mode, token, command
    submissions/0001.job.json     the job id, by whoever knows it first (the launcher, or the job itself)
    submissions/0001.cancel.json  `stoker cancel`: the job must end and nothing of it may rise again
    submissions/0002.refused.json a successor that Slurm did not take: the chain is broken (unless there is a job, too)

`sbatch submit.sbatch` by hand is adopted: the job finds no submission of its own and makes one.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import create_json, read_json
from .layout import RunDir

WITHDRAWN = "supervisor: the run is over"  # the successor's marker, where it is not needed any more
AFTER = "STOKER_AFTER"  # in the environment: the job of a chain that this one stands in for
_NAME = re.compile(r"(\d{4,})\.json")


@dataclass(frozen=True)
class Submission:
    run: RunDir
    number: int

    def _path(self, suffix: str) -> Path:
        return self.run.submissions / f"{self.number:04d}{suffix}"

    @property
    def job_id(self) -> str | None:
        """Slurm's job id, None while unknown or where there is no Slurm."""
        try:
            return str(read_json(self._path(".job.json"))["job_id"])
        except FileNotFoundError:
            return None

    @property
    def intention(self) -> dict[str, Any]:
        return read_json(self._path(".json"))

    @property
    def is_cancelled(self) -> bool:
        """Not, as long as storage does not answer: the next start looks again."""
        try:
            return self._path(".cancel.json").exists()
        except OSError:
            return False

    @property
    def cancelled_by(self) -> str | None:
        try:
            return str(read_json(self._path(".cancel.json"))["by"])
        except (FileNotFoundError, KeyError):
            return None

    @property
    def mode(self) -> str:
        """`sbatch`, `local`, `salloc`, `adopted`, or `chain`: the successor of the job `after`."""
        return str(self.intention.get("mode"))

    @property
    def refusal(self) -> str | None:
        """Why Slurm did not take the job, as far as is known."""
        if self._path(".job.json").exists():
            return None
        try:
            return str(read_json(self._path(".refused.json"))["error"])
        except FileNotFoundError:
            return None

    def refuse(self, error: str) -> bool:
        return create_json(self._path(".refused.json"), {"error": error, "time": time.time()})

    def set_job(self, job_id: str, cluster: str | None = None) -> bool:
        """False if the job is known already."""
        return create_json(self._path(".job.json"), {"job_id": job_id, "cluster": cluster, "time": time.time()})

    def cancel(self, by: str) -> bool:
        return create_json(self._path(".cancel.json"), {"by": by, "time": time.time()})


def submissions(run: RunDir) -> list[Submission]:
    """Oldest first."""
    if not run.submissions.is_dir():
        return []
    found = (_NAME.fullmatch(p.name) for p in run.submissions.iterdir())
    return [Submission(run, n) for n in sorted(int(m[1]) for m in found if m)]


def series(found: Sequence[Submission], upto: int | None = None) -> list[Submission]:
    """The submissions since a person last launched or resumed, oldest first: that one, and the chain of its successors.

    Budgets and the state of a run are judged over them. `upto`: as if the submissions after this number were not there.
    """
    mine: list[Submission] = []
    for s in reversed([s for s in found if upto is None or s.number <= upto]):
        mine.insert(0, s)
        if s.mode != "chain":
            break
    return mine


def is_called_off(links: Sequence[Submission]) -> bool:
    """Whether a person cancelled a series; a successor that the supervisor withdrew says nothing of the others."""
    return any(s.is_cancelled and (s.cancelled_by != WITHDRAWN or s is links[-1]) for s in links)


def successor_of(run: RunDir, job_id: str) -> Submission | None:
    """The newest submission that is to follow a job."""
    mine = (s for s in reversed(submissions(run)) if s.mode == "chain" and str(s.intention.get("after")) == job_id)
    return next(mine, None)


class TakenError(Exception):
    """Somebody else has submitted the run meanwhile."""


def new_submission(run: RunDir, mode: str, number: int | None = None, **fields: Any) -> Submission:
    """Record the intention to submit. `mode`: see Submission.mode.

    Args:
        number: the number it must get. Who has looked at a run up to submission n, and submits it as n + 1, knows that
            nobody else has done so in between.

    Raises:
        TakenError: there is a submission of that number.
    """
    run.submissions.mkdir(exist_ok=True)
    while True:
        s = Submission(run, next_number(run) if number is None else number)
        record = {"mode": mode, "time": time.time(), "user": os.environ.get("USER", str(os.getuid()))}
        if create_json(s._path(".json"), record | fields):
            return s
        if number is not None:
            raise TakenError(f"{run.path}: somebody else has just submitted it (submission {number})")


def next_number(run: RunDir) -> int:
    """The number that the next submission gets."""
    existing = submissions(run)
    return existing[-1].number + 1 if existing else 1


def rival(run: RunDir, job_id: str, token: str) -> str | None:
    """The other job that has this job's place, if there is one.

    A request that seemed lost is sent again, and both may arrive in the end. All carry the token of one submission: the
    job that is noted there first has it.
    """
    for s in reversed(submissions(run)):
        if s.intention.get("token") == token and not s.set_job(job_id) and s.job_id != job_id:
            return s.job_id
    return None


def own_submission(run: RunDir, job_id: str, token: str | None = None) -> Submission:
    """The submission that this job belongs to; made (`adopted`) if somebody ran sbatch by hand. `token`: the job's."""
    known = submissions(run)
    for s in known:
        if s.job_id == job_id:
            return s
    # The batch script replaced a job of a chain that could not start (slurm_templates/), and could not note that.
    after = os.environ.get(AFTER)
    if after:
        s = new_submission(run, "chain", after=after, token=token)
        s.set_job(job_id)
        return s
    for s in reversed(known):
        # The job started before the launcher could note its id. The newest: an sbatch that was refused leaves an older
        # submission without a job for ever.
        is_free = s.mode == "sbatch" or (s.mode == "chain" and not s.is_cancelled)
        if is_free and s.job_id is None and s.set_job(job_id):
            return s
    s = new_submission(run, "adopted")
    s.set_job(job_id)
    return s
