"""Why Slurm took a job away: from its record, the batch log and the nodes' states (words of 22.05, as seen)."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.launcher import heard, jobinfo
from stoker.launcher import policy_types as p
from stoker.launcher.desk import Question
from stoker.launcher.heard import OwnJob, events_of, inquire
from stoker.launcher.jobinfo import JobInfo, parse
from stoker.launcher.run.outcome import Cause

WORDS = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-30T14:08:35{} ***\n"
REQUEUED = "JobId=7 JobState=COMPLETING Reason=None Restarts=1"


def asked(log: Path, record: str, monkeypatch: pytest.MonkeyPatch, down: tuple[str, ...] = ()) -> p.Terminated:
    monkeypatch.setattr(heard.jobnodes, "down_among", lambda nodes: down)
    job = OwnJob("7", 0, "n[1-2]", log, log_start=len(WORDS.format(" DUE TO TIME LIMIT")))
    info = inquire(job, lambda _: parse(record))
    (event,) = events_of(Question("terminated", "batch"), info, 0, 120.0, 0.0)
    assert isinstance(event, p.Terminated)
    return event


@pytest.mark.parametrize(
    ("due", "why"),
    [
        (" DUE TO PREEMPTION", Cause.PREEMPTED),
        (" DUE TO JOB REQUEUE", Cause.REQUEUED),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", Cause.NODE_FAILURE),
        ("", None),
    ],
)
def test_the_step_daemon_s_words_tell_why_a_job_was_requeued(
    due: str, why: Cause | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "7.log"
    log.write_text(WORDS.format(" DUE TO TIME LIMIT") + WORDS.format(due))  # the first is an earlier attempt's
    event = asked(log, REQUEUED, monkeypatch, down=("n2",))
    assert (event.fate, event.why, event.down) == (p.JobFate.REQUEUED, why, ("n2",))


def test_without_a_log_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = asked(tmp_path / "none", REQUEUED, monkeypatch)
    assert (event.fate, event.why) == (p.JobFate.REQUEUED, None)


@pytest.mark.parametrize(("due", "fate"), [(" DUE TO PREEMPTION", p.JobFate.TAKEN), ("", p.JobFate.CANCELLED)])
def test_scancel_in_the_grace_time_is_no_preemption(
    due: str, fate: p.JobFate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "7.log"
    log.write_text(WORDS.format(" DUE TO TIME LIMIT") + WORDS.format(due))
    record = "JobId=7 JobState=COMPLETING Reason=None Restarts=0 PreemptTime=2026-11-30T14:08:35"
    assert asked(log, record, monkeypatch).fate is fate


def test_a_running_job_costs_one_question(tmp_path: Path) -> None:
    asks = []

    def ask(job: str) -> JobInfo:
        asks.append(job)
        return parse("JobId=7 JobState=RUNNING Restarts=0")

    assert inquire(OwnJob("7", 0, "n1", tmp_path / "none"), ask) is not None
    assert asks == ["7"]


def test_array_tasks_are_asked_for_by_array_and_task() -> None:
    assert jobinfo.slurm_name({"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}) == "7_1"
    assert jobinfo.slurm_name({"SLURM_JOB_ID": "8"}) == "8"


@pytest.mark.parametrize("about", ["clock", "warning"])
def test_an_end_that_preemption_brought_near_is_no_time_limit(about: str) -> None:
    info = parse("JobId=7 JobState=RUNNING Restarts=0 PreemptTime=2026-11-30T14:08:35")
    (event,) = events_of(Question(about, "SIGUSR1"), info, 0, 120.0, 0.0)
    assert isinstance(event, p.Warned)
    assert event.cause is Cause.PREEMPTED
    (event,) = events_of(Question(about, "SIGUSR1"), parse("JobId=7 JobState=RUNNING Restarts=0"), 0, 120.0, 0.0)
    assert isinstance(event, p.Warned)
    assert event.cause is Cause.TIME_LIMIT
