"""`stoker cancel RUN ...`: stop runs for good.

Owns: the order of things: a marker first, by which every part of the run knows that nothing may rise again, then
scancel, or a signal to the local processes; then waiting until they are gone. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Sequence

from . import slurm
from .errors import environment_error
from .find import find_run
from .process import ProcessId, loop_process
from .run.files import read_json
from .run.layout import RunDir
from .run.outcome import EXIT_FAILED, EXIT_FINISHED
from .run.submissions import Submission, new_submission, series, submissions
from .state import attempts_of, cluster_of, jobs_of, look, queue_of

WAIT = 120.0  # seconds: KillWait of usual sites, and what a last save takes
_PAUSE_FIRST, _PAUSE_LONGEST = 0.2, 3.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("stoker cancel", description="Stop runs for good; nothing of them starts again.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, or job id")
    parser.add_argument("--timeout", type=float, default=WAIT, metavar="SECONDS", help="how long to wait for the end")
    arguments = parser.parse_args(argv)
    runs = [find_run(text) for text in arguments.runs]
    return max([cancel(run, arguments.timeout) for run in runs])


def cancel(run: RunDir, timeout: float = WAIT) -> int:
    """Cancel one run and wait for its end; says what happened. Returns the exit code.

    Raises:
        UserError: it was never submitted, or Slurm refuses.
    """
    learn_jobs(run, beside_others=True)
    found = submissions(run)
    if not found:
        raise environment_error(f"{run.path}: never submitted; there is nothing to cancel")
    live = live_jobs(found)
    processes = local_processes(found)
    state = look(run, queue_of([run]))
    # In any case: there may be a job that nobody can see now.
    for submission in {s.number: s for s in (*live, *series(found))}.values():
        submission.cancel("stoker cancel")
    if state.is_over and not live and not any(p.is_alive() is not False for p in processes):
        print(f"{run.path}: {state.state.value} already; nothing to cancel")
        return EXIT_FINISHED
    _stop_jobs(live)
    _stop_processes(processes)
    return _await_end(run, live, processes, timeout)


def learn_jobs(run: RunDir, beside_others: bool = False) -> bool:
    """Look up the run's jobs that its files do not know; whether there were any.

    They are those of submissions whose answer from sbatch was lost, known by their tokens, and those that somebody
    submitted by hand, known by the script. The latter begin a series of their own, by which the run is judged then, so
    they are noted only where no other job of the run is there, or `beside_others`.
    """
    found = submissions(run)
    jobs = slurm.squeue() if found or run.script.exists() else None
    known = {s.job_id for s in found}
    fresh = [job for job in jobs or [] if job.job_id not in known]
    has_learnt = False
    for submission in (s for s in found if s.job_id is None):
        token = submission.intention.get("token")
        for job in [job for job in fresh if token and job.carries(str(token))]:
            has_learnt |= submission.set_job(job.job_id)
            fresh.remove(job)
    known |= {s.job_id for s in found}
    if not beside_others and any(not job.is_over for job in jobs or [] if job.job_id in known):
        return has_learnt
    scripts = [run.script, *run.submissions.glob("*.sbatch")]
    for job in fresh:
        if not job.is_over and any(job.starts(script) for script in scripts):
            # As the job itself does when it starts (run/submissions.py, `own_submission`).
            free = next((s for s in reversed(found) if s.mode == "sbatch" and s.job_id is None), None)
            has_learnt |= (free or new_submission(run, "adopted")).set_job(job.job_id)
    return has_learnt


def live_jobs(found: Sequence[Submission]) -> list[Submission]:
    """Those whose job is in Slurm's queue; where Slurm does not answer, all that have a job.

    The allocation around `stoker run` is the user's own and does not count.
    """
    with_job = [s for s in found if s.job_id and s.intention.get("mode") != "salloc"]
    jobs = jobs_of(with_job)
    if jobs is None:
        return with_job
    return [s for s in with_job if (job := jobs.get(s.job_id or "")) is not None and not job.is_over]


def local_processes(found: Sequence[Submission]) -> list[ProcessId]:
    """The loop of each submission worked on without sbatch, and its supervisor should the loop be dead."""
    processes = []
    for submission in found:
        if submission.intention.get("mode") not in ("local", "salloc"):
            continue
        loop = loop_process(submission)
        if loop is not None and loop.is_alive() is not False:
            processes.append(loop)
            continue
        for attempt in attempts_of(submission.run, submission)[-1:]:
            try:
                start = read_json(attempt.start)
            except (FileNotFoundError, ValueError):
                continue
            supervisor = ProcessId.of(start | {"start": start.get("pid_start")})
            if supervisor is not None and supervisor.is_alive():
                processes.append(supervisor)
    return processes


def _stop_jobs(live: Sequence[Submission]) -> None:
    by_cluster: dict[str | None, list[str]] = {}
    for submission in live:
        by_cluster.setdefault(cluster_of(submission), []).append(submission.job_id or "")
    for cluster, job_ids in by_cluster.items():
        reply = slurm.scancel(job_ids, cluster)
        if reply.code != 0 and "Invalid job id" not in reply.err:
            words = " ".join(reply.err.split()) or "no answer"
            raise environment_error(
                f"scancel {' '.join(job_ids)}: {words}\n"
                "the run is marked as cancelled and will not start again; repeat this to end its job"
            )


def _stop_processes(processes: Sequence[ProcessId]) -> None:
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGTERM)


def _await_end(run: RunDir, live: Sequence[Submission], processes: Sequence[ProcessId], timeout: float) -> int:
    elsewhere = sorted({p.host for p in processes if p.is_alive() is None})
    if elsewhere:
        print(f"{run.path}: marked as cancelled, but its process is on {', '.join(elsewhere)}: repeat this there")
        return EXIT_FAILED
    names = [f"job {s.job_id}" for s in live] + [f"process {p.pid}" for p in processes]

    def is_gone() -> bool:
        return not live_jobs(live) and not any(p.is_alive() for p in processes)

    if not poll(is_gone, timeout):
        print(f"{run.path}: marked as cancelled; {', '.join(names)} did not end within {timeout:g} s")
        return EXIT_FAILED
    print(f"{run.path}: cancelled{'; ' if names else ''}{', '.join(names)}{' ended' if names else ''}")
    return EXIT_FINISHED


def poll(condition: Callable[[], bool], limit: float) -> bool:
    deadline, pause = time.monotonic() + limit, _PAUSE_FIRST
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, _PAUSE_LONGEST)
    return True
