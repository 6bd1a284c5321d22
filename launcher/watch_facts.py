"""The facts that `stoker watch` judges by: one squeue for all runs, then each run's files.

Owns: gathering, and how old things are. Ages are differences of times that the file system gave, so the clocks of
nodes and of this machine do not matter. Nothing here changes a run. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..conf.slurm_time import parse_elapsed
from . import slurm
from .run.effective import effective_config
from .run.files import now_at
from .run.layout import AttemptDir, RunDir
from .run.outcome import SITE_S_DOING, Cause, Next, Outcome
from .run.submissions import Submission, is_called_off, series, submissions, successor_of
from .run.views import made_progress
from .state import Queue, State, attempts_of, front_of, look, queue_of
from .state import facts as state_facts
from .summary import tail_records
from .watch_checks import Facts, Limits

RECENT = 3600.0  # seconds for which an event is worth a line
# Events that a person should hear of, and the fields that say what it was.
ALERTS = {
    "checkpoint_failed": ("error", "reason"),
    "checkpoint_rejected": ("error",),
    "prune_failed": ("error",),
    "no_scontrol": ("consequence",),
    "requeue_refused": ("error",),
    "chain_broken": ("error",),
    "amend_failed": ("error",),
    "bad_node": ("node", "reason"),
    "bad_nodes_allocated": ("nodes",),
    "supervisor_failed": ("error",),
}


def is_settled(run: RunDir) -> bool:
    """Whether its own last word was that nothing is to follow: most runs below an old root, of no further interest.

    A headless job may speak after all when the watch ends it; that is not the run's last word.
    """
    try:
        outcome = state_facts(run, {}).outcome
        if any(replaced_path(s).exists() for s in series(submissions(run))):
            return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return outcome is not None and outcome.next is Next.NOTHING and outcome.cause not in SITE_S_DOING


def ask(runs: Iterable[RunDir]) -> Queue | None:
    """What Slurm says of the runs' jobs; None if it does not answer."""
    return queue_of(runs)


def gather(run: RunDir, queue: Queue | None, limits: Limits) -> Facts:
    """`queue` was asked before.

    Raises:
        OSError, ValueError: a file of the run is missing or damaged.
    """
    found = submissions(run)
    links = series(found)
    state = look(run, queue)
    plain = effective_config(run)
    newest = found[-1] if found else None
    front = front_of(links, queue) if links else None
    job = (queue or {}).get(front.job_id or "") if front else None
    attempts = run.all_attempts()
    last = attempts[-1] if attempts else None
    outcome = Outcome.read(last) if last else None
    now = now_at(run.path)
    elapsed = seconds_of(job.elapsed) if job is not None and job.state == "RUNNING" else None
    sign = _newest(_signs(last)) if last else None
    silent, starting = _silence(now, sign, elapsed) if state.state is State.RUNNING else (None, None)
    began = now - elapsed if elapsed is not None else None
    step = _newest([path for a in attempts[-1:] for _, path in a.all_metrics()])
    worked = max((t for t in (sign, _mtime(intention_path(newest) if newest else None)) if t), default=now)
    disk = os.statvfs(run.checkpoints if run.checkpoints.exists() else run.path)
    suspicious = silent is not None and silent > limits.silence
    return Facts(
        name=run.path.name,
        state=state,
        submission=newest.number if newest else 0,
        mode=front.mode if front else None,
        is_cancelled=bool(links) and is_called_off(links),
        queue_known=queue is not None,
        has_job=front is not None and front.job_id is not None,
        job=job,
        continuation=str(plain["resilience"]["continuation"]),
        has_successor=_has_successor(front, queue) if front else None,
        attempts=len(attempts_of(run, *links)) if links else 0,
        outcome=outcome,
        waiting=now - worked,
        starting=starting,
        silent=silent,
        # A script of the user's own need not tell its steps.
        stalled=None
        if silent is None or (step is None and plain.get("task", {}).get("cmd"))
        else now - max(t for t in (step, began, 0.0) if t is not None),
        node_states=_node_states(job) if suspicious and job else "",
        fruitless=fruitless(attempts),
        resumes=_resumes(found),
        releases=len(release_marks(front)) if front else 0,
        was_replaced=any(replaced_path(s).exists() for s in links),
        alerts=(_alerts(last, now) if last else ()) + _tracker_alert(run, now),
        free=disk.f_bavail / disk.f_blocks if disk.f_blocks else None,
        free_bytes=disk.f_bavail * disk.f_frsize,
        checkpoint_bytes=_checkpoint_bytes(run),
    )


def intention_path(s: Submission) -> Path:
    return s.run.submissions / f"{s.number:04d}.json"


def replaced_path(s: Submission) -> Path:
    """Written before the watch ends a job that does nothing, so that a watch which dies then is carried on."""
    return s.run.submissions / f"{s.number:04d}.headless.json"


def release_path(s: Submission, number: int) -> Path:
    return s.run.submissions / f"{s.number:04d}.release-{number}.json"


def release_marks(s: Submission) -> list[Path]:
    return list(s.run.submissions.glob(f"{s.number:04d}.release-*.json"))


def seconds_of(elapsed: str) -> float | None:
    """squeue's time used: `1:05`, `2:03:04`, `1-02:03:04`; None for anything else."""
    try:
        return float(parse_elapsed(elapsed.strip()))
    except ValueError:
        return None


def _has_successor(front: Submission, queue: Queue | None) -> bool | None:
    """Whether the next job of a chain waits, or is being submitted."""
    after = successor_of(front.run, front.job_id or "")
    if after is None or after.is_cancelled or after.refusal is not None:
        return False
    if after.job_id is None:
        return True
    if queue is None:
        return None
    job = queue.get(after.job_id)
    return job is not None and not job.is_over


def _silence(now: float, sign: float | None, elapsed: float | None) -> tuple[float | None, float | None]:
    """(seconds since the last sign of this start of the job, or else seconds since that start).

    The time used comes from another clock than the signs' ages; where the two are close, the later one counts.
    """
    if elapsed is None:
        return None, None
    if sign is None or now - sign > elapsed:
        return None, elapsed
    return now - sign, None


def _signs(attempt: AttemptDir) -> list[Path]:
    """What grows, or is touched, while something works on an attempt."""
    folders = [attempt.path / "events", attempt.path / "logs"]
    return [attempt.start, *(p for f in folders for p in f.glob("*")), *(p for _, p in attempt.all_metrics())]


def _mtime(path: Path | None) -> float | None:
    try:
        return path.stat().st_mtime if path is not None else None
    except OSError:
        return None


def _newest(paths: Iterable[Path]) -> float | None:
    return max((t for t in map(_mtime, paths) if t is not None), default=None)


def fruitless(attempts: Sequence[AttemptDir]) -> int:
    """The newest ended attempts in a row without a step; what is the site's doing neither counts nor interrupts."""
    count = 0
    for attempt in reversed(attempts):
        outcome = Outcome.read(attempt)
        if made_progress(attempt):
            break
        if attempt is attempts[-1] and outcome is None:
            continue  # it may be at work
        if outcome is None or outcome.cause not in (Cause.PREEMPTED, Cause.NODE_FAILURE):
            count += 1
    return count


def _resumes(found: Sequence[Submission]) -> int:
    """Series in a row, the newest first, that the watch began and in which nothing was done."""
    count = 0
    for s in reversed(found):
        if any(made_progress(a) for a in attempts_of(s.run, s)):
            break
        if s.mode == "chain":
            continue
        if s.intention.get("by") != "watch":
            break
        count += 1
    return count


def _alerts(attempt: AttemptDir, now: float) -> tuple[str, ...]:
    """Recent events that warn of something, each kind once with its newest words."""
    said: dict[str, str] = {}
    for path in sorted((attempt.path / "events").glob("*.jsonl")):
        changed = _mtime(path)
        if changed is None or now - changed > RECENT:
            continue
        for record in tail_records(path):
            name = str(record.get("event"))
            # The writer's clock against the file's: minutes do not matter to an hour.
            if name in ALERTS and changed - float(record.get("time", 0.0)) < RECENT:
                said[name] = _words(record, ALERTS[name])
    return tuple(f"{name}: {text}" for name, text in said.items())


def _tracker_alert(run: RunDir, now: float) -> tuple[str, ...]:
    """Whether the tracker has given up on a run that goes on (track.py's notes)."""
    path = run.report / "track.jsonl"
    changed = _mtime(path)
    if changed is None or now - changed > RECENT:
        return ()
    last = tail_records(path)[-1:]
    return tuple(
        f"tracker: {_words(r, ('error',))} (`stoker track` sends the rest)" for r in last if r.get("event") == "gave_up"
    )


def _words(record: dict[str, Any], fields: tuple[str, ...]) -> str:
    words = " ".join(str(record[key]) for key in fields if record.get(key))
    return " ".join(words.split())[:200] or "see events"


def _checkpoint_bytes(run: RunDir) -> int:
    total = 0
    for name in run.all_checkpoints()[:1]:
        with contextlib.suppress(OSError):
            total = sum(entry.stat().st_size for entry in os.scandir(run.checkpoint(name)) if entry.is_file())
    return total


def _node_states(job: slurm.QueuedJob) -> str:
    states = slurm.node_states(job.nodes) or {}
    return ", ".join(f"{node} {state}" for node, state in sorted(states.items())[:8])
