"""Slurm's commands for jobs: thin calls, and pure parsers of what they print.

Owns: every sbatch, squeue and scancel call of the launching side. What their answers mean for a run is state.py's,
whether to try again is submit.py's, what the site allows is site.py's. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..conf import slurm_jobid
from .environment import without_outer_job
from .errors import UserError, environment_error

TIMEOUT = 30.0  # seconds a Slurm command may take; slurmctld answers in milliseconds or is in trouble
AT_ONCE = 4.0  # the same where a person waits, and the files say most of it without Slurm
_SEPARATOR = "\x1f"  # no run directory, comment or reason has it
_FIELDS = ("%i", "%T", "%M", "%N", "%r", "%Z", "%k", "%o")
_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
_ENDED |= {"REVOKED", "TIMEOUT"}
_JOB_ID_WORDS = re.compile(r"Submitted batch job (\d+)(?: on cluster (\S+))?")
# What sbatch says when it lost the controller's answer: the job may be in the queue all the same.
_UNSURE = re.compile(
    r"timed out|time-?out|zero bytes|unable to contact|connect failure|communication|connection|"
    r"unexpected message|unexpected (?:eof|end)|socket|interrupted|temporarily|try again",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Reply:
    """How a command ended. `code` is None if it was stopped after the time-out."""

    code: int | None
    out: str
    err: str


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue shows it, finished ones included as long as Slurm remembers them (minutes)."""

    job_id: str  # array tasks as 12_3
    state: str  # PENDING, RUNNING, COMPLETED, ...
    elapsed: str
    nodes: str  # host list, empty while pending
    reason: str
    workdir: str
    comment: str
    command: str = ""  # path of the script that was given to sbatch, and its arguments

    def carries(self, token: str) -> bool:
        """Whether it was submitted with a token (submit.py)."""
        return self.comment.endswith(f"stoker:{token}")

    def starts(self, script: Path) -> bool:
        """Whether it was submitted with this script."""
        named = {str(script), os.path.realpath(script)}
        return any(self.command == name or self.command.startswith(f"{name} ") for name in named)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended for good; what is not known to be an end (SUSPENDED, a new state) is none."""
        return self.state in _ENDED


def is_available() -> bool:
    """Whether sbatch can be found."""
    import shutil  # not quick to import, and status has no use for it

    return shutil.which("sbatch") is not None


def call(argv: Sequence[str], timeout: float = TIMEOUT, extra: Mapping[str, str] | None = None) -> Reply:
    """Run a Slurm command outside of whatever job this process is in. `extra`: more environment for it.

    Raises:
        UserError: there is no such command on this machine.
    """
    env = without_outer_job(os.environ) | dict(extra or {})
    try:
        done = subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, env=env, check=False
        )
    except FileNotFoundError as e:
        raise environment_error(
            f"no Slurm here ({argv[0]} not found): use cluster=local, or run this where Slurm's commands are"
        ) from e
    except subprocess.TimeoutExpired as e:
        return Reply(None, os.fsdecode(e.stdout or b""), os.fsdecode(e.stderr or b""))
    return Reply(done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr))


def sbatch(script: Path, options: Sequence[str], timeout: float, extra: Mapping[str, str] | None = None) -> Reply:
    """`extra` reaches the job, too, where sbatch exports the environment."""
    return call(["sbatch", "--parsable", *options, str(script)], timeout, extra)


def squeue(
    job_ids: Iterable[str] | None = None, cluster: str | None = None, timeout: float = TIMEOUT
) -> list[QueuedJob] | None:
    """Jobs known to Slurm, in one call: the given ones, or all of this user. None if Slurm does not answer.

    Never raises for want of Slurm: the files of a run say most of it.
    """
    command = ["squeue", "--noheader", "--states=all", f"--format={_SEPARATOR.join(_FIELDS)}"]
    if cluster:
        command.append(f"--clusters={cluster}")
    if job_ids is None:
        command.append(f"--user={os.getuid()}")
    else:
        wanted = sorted(set(job_ids))
        if not wanted:
            return []
        command.append(f"--jobs={','.join(wanted)}")
    try:
        reply = call(command, timeout)
    except UserError:
        return None
    if reply.code == 0:
        return parse_squeue(reply.out)
    # A single id that Slurm has forgotten is an error for squeue; among several it is left out silently.
    return [] if "Invalid job id" in reply.err else None


def node_states(nodes: str, timeout: float = TIMEOUT) -> dict[str, str] | None:
    """State of each node of a host list, such as `mixed` or `down*`. None if Slurm does not answer."""
    try:
        reply = call(["sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T"], timeout)
    except UserError:
        return None
    rows = (line.split() for line in reply.out.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2} if reply.code == 0 else None


def release(job_id: str, cluster: str | None = None) -> Reply:
    """Let a held job go."""
    return call(["scontrol", *([f"--clusters={cluster}"] if cluster else []), "release", job_id])


def was_cancelled(job_id: str, cluster: str | None = None) -> bool | None:
    """Whether a person cancelled a job that squeue has forgotten. None where there is no accounting to ask."""
    where = [f"--clusters={cluster}"] if cluster else []
    try:
        reply = call(
            ["sacct", *where, "--noheader", "--parsable2", "--allocations", "--format=State", f"--jobs={job_id}"]
        )
    except UserError:
        return None
    return parse_cancelled(reply.out) if reply.code == 0 else None


def parse_cancelled(text: str) -> bool | None:
    """Whether sacct's states of a job's allocations say so (`CANCELLED by 1000`); None if it knows no such job."""
    states = text.split("\n") if text.strip() else []
    return any(s.startswith("CANCELLED") for s in states) if states else None


def scancel(job_ids: Sequence[str], cluster: str | None = None) -> Reply:
    return call(["scancel", *([f"--clusters={cluster}"] if cluster else []), *job_ids])


def is_sure_refusal(reply: Reply) -> bool:
    """Whether sbatch's failure means that no job was made, rather than that the answer was lost."""
    return reply.code is not None and reply.code > 0 and not _UNSURE.search(reply.err)


def parse_job_id(text: str) -> tuple[str, str | None] | None:
    """(job id, cluster) from what `sbatch --parsable` printed; sites print banners around it.

    None if there is no id, or more than one line could be it.
    """
    found = set()
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            job_id = slurm_jobid.parse_job_id(line.strip())
            if job_id == slurm_jobid.JobId(job_id.job, cluster=job_id.cluster):
                found.add((str(job_id.job), job_id.cluster))
    if not found:
        found = {(m[1], m[2]) for m in _JOB_ID_WORDS.finditer(text)}
    return found.pop() if len(found) == 1 else None


def parse_squeue(text: str) -> list[QueuedJob]:
    """Rows of our own format; lines that do not fit (`CLUSTER: name`, warnings) are passed over."""
    rows = (line.split(_SEPARATOR) for line in text.splitlines())
    return [QueuedJob(*(cell.strip() for cell in row)) for row in rows if len(row) == len(_FIELDS)]
