"""What state a run is in: one judgement from its files and from what squeue says, used by every verb.

Owns: gathering the facts (`look`) and judging them (`judge`, pure). Files are read after squeue was asked: a job that
ends in between then shows its outcome. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from . import slurm
from .avoid import run_id
from .process import loop_process
from .run.badnodes import directory_of, known
from .run.files import read_json
from .run.layout import AttemptDir, RunDir
from .run.outcome import EXIT_CANCELLED, EXIT_FAILED, EXIT_FINISHED, Cause, Next, Outcome
from .run.submissions import Submission, is_called_off, series, submissions
from .slurm import QueuedJob

Queue = Mapping[str, QueuedJob]  # by job id


class State(str, Enum):
    FROZEN = "FROZEN"  # never submitted
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    REQUEUED = "REQUEUED"  # it has run, and waits to go on
    HELD = "HELD"  # waits until somebody releases it
    SUSPENDED = "SUSPENDED"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    INTERRUPTED = "INTERRUPTED"  # it would go on, but nothing will start it
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class RunState:
    state: State
    detail: str = ""  # for people: Slurm's reason, the cause, what to do
    exit_code: int | None = None  # set once nothing will happen any more without a person

    @property
    def is_over(self) -> bool:
        return self.exit_code is not None


@dataclass(frozen=True)
class Facts:
    """What is known of the submissions since a person last launched or resumed (run/submissions.py, `series`).

    The job is the one that counts: the running one, or who is next, not the successor that waits behind it.
    """

    mode: str | None  # sbatch, local, salloc, adopted; None: there is no submission
    job_id: str | None
    is_cancelled: bool
    attempts: int  # of these submissions
    outcome: Outcome | None  # of its newest attempt
    job: QueuedJob | None
    queue_known: bool  # whether Slurm answered
    loop_alive: bool | None = None  # of a local run; None: on another host
    has_begun: bool = True  # whether its batch script was ever started
    unusable: str | None = None  # why the last node could not even start the run's job, as the batch script said
    broken: str | None = None  # why nothing will follow the job, where a successor should


def queue_of(runs: Iterable[RunDir], timeout: float = slurm.TIMEOUT) -> Queue | None:
    """What Slurm says of the newest jobs of each run; None if it does not answer or is not here."""
    return jobs_of([submission for run in runs for submission in series(submissions(run))[-_LINKS:]], timeout)


def jobs_of(found_submissions: Iterable[Submission], timeout: float = slurm.TIMEOUT) -> Queue | None:
    """The same for given submissions: one squeue call (one per cluster, where there are several)."""
    wanted: dict[str | None, list[str]] = {}
    for submission in found_submissions:
        job_id = submission.job_id
        if job_id:
            wanted.setdefault(cluster_of(submission), []).append(job_id)
    found: dict[str, QueuedJob] = {}
    for cluster, job_ids in wanted.items():
        jobs = slurm.squeue(job_ids, cluster, timeout)
        if jobs is None:
            return None
        found |= {job.job_id: job for job in jobs}
    return found


def cluster_of(submission: Submission) -> str | None:
    """The cluster that took the job, where sbatch named one."""
    try:
        name = read_json(submission.run.submissions / f"{submission.number:04d}.job.json").get("cluster")
    except FileNotFoundError:
        return None
    return str(name) if name else None


def look(run: RunDir, queue: Queue | None) -> RunState:
    """Judge a run. `queue`: asked before this call; None where Slurm does not answer."""
    return judge(facts(run, queue))


def facts(run: RunDir, queue: Queue | None) -> Facts:
    found = submissions(run)
    if not found:
        return Facts(None, None, False, 0, None, None, queue is not None)
    links = series(found)
    front = front_of(links, queue)
    mine = attempts_of(run, *links)
    job_id = front.job_id
    outcome = Outcome.read(mine[-1]) if mine else None
    job = queue.get(job_id) if queue is not None and job_id else None
    return Facts(
        mode=front.mode,
        job_id=job_id,
        is_cancelled=is_called_off(links),
        attempts=len(mine),
        outcome=outcome,
        job=job,
        queue_known=queue is not None,
        loop_alive=_loop_alive(front),
        has_begun=bool(mine) or job_id is None or (run.job_logs / f"{job_id}.log").exists(),
        unusable=_unusable(run, outcome) if job is None or job.is_over else None,
        broken=_broken(links, queue),
    )


def _unusable(run: RunDir, outcome: Outcome | None) -> str | None:
    """What the batch script said of a node that could not start the run, if that was the last thing to happen."""
    if outcome is not None and outcome.next is Next.NOTHING:
        return None
    identity = run_id(run)
    own = [f for f in known(directory_of(run), identity).values() if f.run == identity and f.attempt == 0]
    last = max(own, key=lambda f: f.time, default=None)
    if last is None or (outcome is not None and last.time < outcome.time):
        return None
    return f"{last.node} could not start it: {last.reason}"


_LINKS = 3  # submissions of a chain that can matter: the running one, its successor, and one that is on its way out


def front_of(links: Sequence[Submission], queue: Queue | None) -> Submission:
    """The submission of a series whose job counts: the newest that does not wait for another one to end."""
    jobs = [(s, queue.get(s.job_id) if queue is not None and s.job_id else None) for s in links[-_LINKS:]]
    live = [(s, job) for s, job in jobs if job is not None and not job.is_over]
    for s, job in reversed(live):
        if not (job.state == "PENDING" and job.reason.startswith("Dependency")):
            return s
    if live:
        return live[0][0]
    began = [s for s in links if s.mode != "chain" or _has_attempt(s)]
    return began[-1]


def _has_attempt(submission: Submission) -> bool:
    return any(submission_of(a) == submission.number for a in submission.run.all_attempts()[-_LINKS:])


def _broken(links: Sequence[Submission], queue: Queue | None) -> str | None:
    """Why the chain ends with its last link, as far as can be told."""
    last = links[-1]
    if last.mode != "chain":
        return None
    if last.refusal is not None:
        return f"chain broken: {last.refusal}"
    job = queue.get(last.job_id) if queue is not None and last.job_id else None
    if job is not None and job.is_over and len(links) > 1 and not _has_attempt(last):
        return f"chain broken: successor job {job.job_id} was ended as {job.state} before it could start"
    return None


def attempts_of(run: RunDir, *wanted: Submission) -> list[AttemptDir]:
    """The attempts of submissions, oldest first. One that has not said yet whose it is belongs to the newest."""
    numbers, newest = {s.number for s in wanted}, wanted[-1].number
    return [a for a in run.all_attempts() if (submission_of(a) or newest) in numbers]


def submission_of(attempt: AttemptDir) -> int | None:
    """The number of the submission that an attempt belongs to; None if it has not said."""
    try:
        return int(read_json(attempt.start)["submission"])
    except (FileNotFoundError, ValueError, KeyError):
        return None


def _loop_alive(submission: Submission) -> bool | None:
    process = loop_process(submission)
    return False if process is None else process.is_alive()


def judge(f: Facts) -> RunState:
    state = _judge(f)
    if f.broken is None or (state.is_over and state.state is not State.INTERRUPTED):
        return state
    return replace(state, detail=f"{state.detail}; {f.broken}" if state.detail else f.broken)


def _judge(f: Facts) -> RunState:
    if f.mode is None:
        return RunState(State.FROZEN, "never submitted; `sbatch submit.sbatch` in its directory starts it")
    if f.outcome is not None and f.outcome.next is Next.NOTHING:
        return _final(f.outcome)
    if f.mode in ("local", "salloc"):
        return _local(f)
    if f.job is not None:
        return _queued(f, f.job)
    if f.is_cancelled:
        return RunState(State.CANCELLED, "by `stoker cancel`", EXIT_CANCELLED)
    if not f.queue_known:
        return RunState(State.UNKNOWN, "Slurm does not answer here; the files do not say how it ended")
    if f.job_id is None:
        return RunState(State.UNKNOWN, "Slurm has not told the job's id; see `squeue --me`")
    return _gone(f, f"job {f.job_id} is no longer known to Slurm")


def _final(outcome: Outcome) -> RunState:
    if outcome.cause is Cause.FINISHED:
        return RunState(State.FINISHED, "", EXIT_FINISHED)
    if outcome.cause is Cause.CANCELLED:
        return RunState(State.CANCELLED, outcome.reason, outcome.exit_code or EXIT_CANCELLED)
    return RunState(State.FAILED, f"{outcome.cause.value}: {outcome.reason}", outcome.exit_code or EXIT_FAILED)


def _local(f: Facts) -> RunState:
    if f.loop_alive is None:
        return RunState(State.UNKNOWN, "it was started on another host")
    if f.loop_alive:
        if f.outcome is not None:
            return RunState(State.REQUEUED, f"after {f.outcome.cause.value}; starts again at once")
        return RunState(State.RUNNING if f.attempts else State.PENDING, "" if f.attempts else "starting")
    if f.is_cancelled:
        return RunState(State.CANCELLED, "", EXIT_CANCELLED)
    return _gone(f, "its process is gone")


def _queued(f: Facts, job: QueuedJob) -> RunState:
    """A job that squeue shows. Everything that is not known to be an end counts as going on."""
    ran = f.attempts > 0
    if job.state == "PENDING" and ("held" in job.reason.lower() or job.reason == "launch_failed_requeued_held"):
        return RunState(State.HELD, f"{job.reason}: `scontrol release {job.job_id}` lets it go on")
    if job.state in ("REQUEUE_HOLD", "SPECIAL_EXIT"):
        return RunState(State.HELD, f"{job.state}: `scontrol release {job.job_id}` lets it go on")
    if job.state in ("PENDING", "REQUEUED", "REQUEUE_FED"):
        return RunState(State.REQUEUED if ran else State.PENDING, job.reason)
    if job.state == "CONFIGURING":
        return RunState(State.REQUEUED if ran else State.PENDING, "nodes are being set up")
    if job.state in ("SUSPENDED", "STOPPED"):
        return RunState(State.SUSPENDED, "by Slurm")
    if job.state == "CANCELLED":
        return RunState(State.CANCELLED, "by scancel" if not f.is_cancelled else "by `stoker cancel`", EXIT_CANCELLED)
    if job.is_over:
        return _gone(f, f"Slurm ended job {job.job_id} as {job.state}")
    if f.outcome is not None and f.outcome.next is Next.REQUEUE:
        return RunState(State.REQUEUED, f"after {f.outcome.cause.value}; the job is being requeued")
    if f.outcome is not None and job.state == "COMPLETING":
        return RunState(State.REQUEUED, f"after {f.outcome.cause.value}; its successor goes on")
    return RunState(State.RUNNING, "ending" if job.state == "COMPLETING" else "" if ran else "starting")


def _gone(f: Facts, how: str) -> RunState:
    """Nothing works on the run any more, and no attempt said that this was the end."""
    how = f"{how} ({f.unusable})" if f.unusable else how
    if f.outcome is not None:
        detail = f"after {f.outcome.cause.value}, {how} and was not started again; `stoker resume` goes on"
        return RunState(State.INTERRUPTED, detail, EXIT_FAILED)
    if not f.has_begun:
        return RunState(State.CANCELLED, f"{how} and never started", EXIT_CANCELLED)
    if not f.attempts:
        return RunState(State.FAILED, f"{how} before the supervisor started; see slurm/*.log", EXIT_FAILED)
    return RunState(State.FAILED, f"{how} and nothing says why; `stoker resume` goes on", EXIT_FAILED)
