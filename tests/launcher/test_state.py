"""What state a run is in, judged from its files and from squeue."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from stoker.launcher.avoid import run_id
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.badnodes import Finding, directory_of, note
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.outcome import Cause, Next, Outcome
from stoker.launcher.run.submissions import Submission, new_submission, series, submissions
from stoker.launcher.slurm import QueuedJob
from stoker.launcher.state import Facts, State, front_of, judge, look


def job(state: str, reason: str = "None") -> QueuedJob:
    return QueuedJob("7", state, "0:00", "", reason, "/w", "")


def ended(cause: Cause, next_: Next = Next.NOTHING, code: int = 1) -> Outcome:
    return Outcome(cause, next_, code, "why")


NOTHING_KNOWN = Facts("sbatch", "7", False, 0, None, None, True)
RAN = replace(NOTHING_KNOWN, attempts=1)
DONE = replace(RAN, outcome=ended(Cause.FINISHED, code=0))
TO_REQUEUE = replace(RAN, outcome=ended(Cause.PREEMPTED, Next.REQUEUE, 75))
CHAINED = replace(RAN, mode="chain", outcome=ended(Cause.TIME_LIMIT, Next.CHAIN, 75))
LOCAL = replace(RAN, mode="local", job_id=None, loop_alive=True)

TABLE = [
    ("never submitted", replace(NOTHING_KNOWN, mode=None), State.FROZEN, "never submitted", None),
    ("waits", replace(NOTHING_KNOWN, job=job("PENDING", "Resources")), State.PENDING, "Resources", None),
    ("nodes boot", replace(NOTHING_KNOWN, job=job("CONFIGURING")), State.PENDING, "being set up", None),
    ("starts", replace(NOTHING_KNOWN, job=job("RUNNING")), State.RUNNING, "starting", None),
    ("runs", replace(RAN, job=job("RUNNING")), State.RUNNING, "", None),
    ("ends", replace(RAN, job=job("COMPLETING")), State.RUNNING, "ending", None),
    ("suspended", replace(RAN, job=job("SUSPENDED")), State.SUSPENDED, "", None),
    ("requeued", replace(TO_REQUEUE, job=job("PENDING", "BeginTime")), State.REQUEUED, "BeginTime", None),
    ("being requeued", replace(TO_REQUEUE, job=job("COMPLETING")), State.REQUEUED, "after preempted", None),
    ("requeued, no word", replace(RAN, job=job("PENDING", "BeginTime")), State.REQUEUED, "BeginTime", None),
    ("held", replace(NOTHING_KNOWN, job=job("PENDING", "JobHeldUser")), State.HELD, "scontrol release 7", None),
    ("launch failed", replace(RAN, job=job("PENDING", "launch_failed_requeued_held")), State.HELD, "release 7", None),
    ("requeue hold", replace(RAN, job=job("REQUEUE_HOLD")), State.HELD, "scontrol release 7", None),
    ("finished", DONE, State.FINISHED, "", 0),
    ("finished, ending", replace(DONE, job=job("COMPLETING")), State.FINISHED, "", 0),
    ("failed", replace(RAN, outcome=ended(Cause.OUT_OF_MEMORY, code=3)), State.FAILED, "out_of_memory: why", 3),
    ("cancelled", replace(RAN, outcome=ended(Cause.CANCELLED, code=143)), State.CANCELLED, "why", 143),
    ("scancelled", replace(NOTHING_KNOWN, job=job("CANCELLED")), State.CANCELLED, "by scancel", 143),
    ("marked", replace(NOTHING_KNOWN, is_cancelled=True), State.CANCELLED, "stoker cancel", 143),
    ("marked, still there", replace(RAN, is_cancelled=True, job=job("COMPLETING")), State.RUNNING, "ending", None),
    ("killed by Slurm", replace(RAN, job=job("TIMEOUT")), State.FAILED, "job 7 as TIMEOUT and nothing says why", 1),
    ("broken script", replace(NOTHING_KNOWN, job=job("FAILED")), State.FAILED, "before the supervisor started", 1),
    ("vanished", RAN, State.FAILED, "no longer known to Slurm and nothing says why", 1),
    ("never began", replace(NOTHING_KNOWN, has_begun=False), State.CANCELLED, "never started", 143),
    ("not requeued", TO_REQUEUE, State.INTERRUPTED, "after preempted", 1),
    ("preempt cancels", replace(TO_REQUEUE, job=job("PREEMPTED")), State.INTERRUPTED, "as PREEMPTED", 1),
    ("no Slurm here", replace(RAN, queue_known=False), State.UNKNOWN, "Slurm does not answer", None),
    ("no Slurm, said", replace(RAN, queue_known=False, outcome=ended(Cause.HANG)), State.FAILED, "hang", 1),
    ("answer lost", replace(NOTHING_KNOWN, job_id=None), State.UNKNOWN, "not told the job's id", None),
    ("chain goes on", replace(CHAINED, job=job("COMPLETING")), State.REQUEUED, "its successor goes on", None),
    ("successor next", replace(CHAINED, job=job("PENDING", "Resources")), State.REQUEUED, "Resources", None),
    ("successor runs", replace(CHAINED, job=job("RUNNING")), State.RUNNING, "", None),
    ("chain broken", replace(RAN, job=job("RUNNING"), broken="broken: x"), State.RUNNING, "broken: x", None),
    ("chain ended", replace(CHAINED, broken="chain broken: x"), State.INTERRUPTED, "goes on; chain broken: x", 1),
    ("finished, withdrawn", replace(DONE, broken="chain broken: x"), State.FINISHED, "", 0),
    ("local runs", LOCAL, State.RUNNING, "", None),
    ("local starts", replace(LOCAL, attempts=0), State.PENDING, "starting", None),
    ("local again", replace(LOCAL, outcome=ended(Cause.CRASH, Next.REQUEUE)), State.REQUEUED, "after crash", None),
    ("local killed", replace(LOCAL, loop_alive=False), State.FAILED, "its process is gone", 1),
    ("local cancelled", replace(LOCAL, loop_alive=False, is_cancelled=True), State.CANCELLED, "", 143),
    ("local elsewhere", replace(LOCAL, loop_alive=None), State.UNKNOWN, "another host", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "state", "detail", "exit_code"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_judgement(facts: Facts, state: State, detail: str, exit_code: int | None) -> None:
    found = judge(facts)
    assert found.state is state
    assert detail in found.detail
    assert found.exit_code == exit_code
    assert found.is_over is (exit_code is not None)


def test_a_resumed_run_is_not_judged_by_its_former_end(make_run: Callable[..., RunDir]) -> None:
    run = make_run()
    first = new_submission(run, "sbatch")
    first.set_job("7")
    attempt = claim(run)
    attempt.start.write_text(json.dumps({"submission": 1}))
    ended(Cause.FINISHED, code=0).write(attempt)
    assert look(run, {}).state is State.FINISHED
    second = new_submission(run, "sbatch")
    second.set_job("8")
    assert look(run, {"8": replace(job("PENDING", "Priority"), job_id="8")}).state is State.PENDING


def chain_of(run: RunDir, *job_ids: str) -> list[Submission]:
    """A launch and its successors."""
    first = new_submission(run, "sbatch")
    first.set_job(job_ids[0])
    links = [first]
    for before, job_id in itertools.pairwise(job_ids):
        link = new_submission(run, "chain", after=before)
        link.set_job(job_id)
        links.append(link)
    return links


def queue(**states: str) -> dict[str, QueuedJob]:
    """j7="RUNNING", j8="PENDING:Dependency"."""
    found = {}
    for name, text in states.items():
        state, _, reason = text.partition(":")
        found[name[1:]] = replace(job(state, reason or "None"), job_id=name[1:])
    return found


@pytest.mark.parametrize(
    ("jobs", "state", "front"),
    [
        (queue(j7="RUNNING", j8="PENDING:Dependency"), State.RUNNING, "7"),
        (queue(j7="COMPLETING", j8="PENDING:Dependency"), State.RUNNING, "7"),
        (queue(j7="FAILED", j8="PENDING:Resources"), State.REQUEUED, "8"),
        (queue(j8="PENDING:Dependency"), State.REQUEUED, "8"),
        (queue(j7="FAILED", j8="RUNNING"), State.RUNNING, "8"),
        (queue(j7="TIMEOUT", j8="CANCELLED"), State.FAILED, "7"),
    ],
)
def test_a_run_is_judged_over_its_series(
    jobs: dict[str, QueuedJob], state: State, front: str, make_run: Callable[..., RunDir]
) -> None:
    """While the running job's successor waits the run is running, not pending."""
    run = make_run()
    links = chain_of(run, "7", "8")
    claim(run).start.write_text(json.dumps({"submission": 1}))
    assert look(run, jobs).state is state
    assert front_of(links, jobs).job_id == front


def test_a_successor_that_was_ended_or_refused_shows_that_the_chain_is_broken(make_run: Callable[..., RunDir]) -> None:
    run = make_run()
    chain_of(run, "7", "8")
    claim(run).start.write_text(json.dumps({"submission": 1}))
    detail = look(run, queue(j7="RUNNING", j8="CANCELLED")).detail
    assert detail == "chain broken: successor job 8 was ended as CANCELLED before it could start"
    new_submission(run, "chain", after="7").refuse("sbatch refused the job: Invalid qos")
    assert look(run, queue(j7="RUNNING")).detail == "chain broken: sbatch refused the job: Invalid qos"


def test_a_resume_begins_a_series_of_its_own(make_run: Callable[..., RunDir]) -> None:
    run = make_run()
    chain_of(run, "7", "8")
    claim(run).start.write_text(json.dumps({"submission": 2}))
    ended(Cause.CRASH).write(run.attempt(1))
    chain_of(run, "9", "10")
    assert [s.job_id for s in series(submissions(run))] == ["9", "10"]
    assert look(run, queue(j9="PENDING:Priority", j10="PENDING:Dependency")).state is State.PENDING


def test_why_no_node_could_start_a_run_is_told_until_an_attempt_has_begun(make_run: Callable[..., RunDir]) -> None:
    run = make_run()
    new_submission(run, "sbatch", token="t").set_job("1")
    (run.job_logs / "1.log").touch()
    why, now = "cluster.setup failed with exit code 1 at: module load cuda", time.time()
    note(directory_of(run), Finding("n3", why, "launch_failed", run_id(run), 0, now, now + 3600.0, True))
    note(directory_of(run), Finding("n4", "of another run", "launch_failed", "other", 0, now + 1.0, now + 3600.0, True))
    found = look(run, queue(j1="FAILED"))
    assert found.detail.startswith(f"Slurm ended job 1 as FAILED (n3 could not start it: {why}) before the supervisor")
    assert look(run, queue(j1="PENDING")).detail == "None"
    Outcome(Cause.PREEMPTED, Next.REQUEUE, 75, "later", time=now + 1.0).write(claim(run))
    assert "n3" not in look(run, queue(j1="FAILED")).detail
