"""The last word for a supervisor that could not say it: killed, broken down, or ended before it took an attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher import aftermath, supervise
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.events import EventLog
from stoker.launcher.run.files import create_json, write_json
from stoker.launcher.run.layout import AttemptDir, RunDir
from stoker.launcher.run.outcome import Cause, Next, Outcome
from stoker.launcher.run.submissions import new_submission, own_submission, submissions
from stoker.launcher.supervise_start import end_already

SHOW = 'case "$*" in requeue*|update*) exit 0 ;; esac; echo "JobId=7 JobState={} Reason=None Restarts=2 BatchFlag=1"'
RESILIENCE = {
    "continuation": "requeue", "budgets": {}, "backoff": 20.0, "max_backoff": 600.0, "bad_node_hours": 24.0,
    "avoid_bad_nodes": True,
}  # fmt: skip


@pytest.fixture
def run(make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch, fake_slurm: Any) -> RunDir:
    """Job 7 works on it, started for the third time."""
    found = make_run()
    new_submission(found, "sbatch", token="tok1").set_job("7")
    config = {"cluster": {"nodes": 2, "partition": None, "exclude": None, "nodelist": None}, "resilience": RESILIENCE}
    write_json(found.config_json, config)
    (fake_slurm.directory / "sh").symlink_to("/bin/sh")
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "STOKER_SUBMISSION": "tok1"}.items():
        monkeypatch.setenv(name, value)
    for module in (aftermath, supervise):
        monkeypatch.setattr(module, "SignalPipe", lambda: None)
    fake_slurm.program("scontrol", SHOW.format("RUNNING"))
    return found


def attempt(run: RunDir, restarts: int, job: str = "7", submission: int = 1) -> AttemptDir:
    found = claim(run)
    create_json(found.start, {"job_id": job, "restart_count": restarts, "submission": submission})
    return found


def requeues(fake_slurm: Any) -> list[str]:
    return [c for c in fake_slurm.calls("scontrol") if c.startswith("requeue")]


@pytest.mark.parametrize(("code", "how"), [(137, "SIGKILL"), (143, "SIGTERM"), (70, "exit code 70")])
def test_a_supervisor_that_did_not_come_to_an_attempt_is_a_failed_launch_and_goes_on(
    run: RunDir, fake_slurm: Any, code: int, how: str
) -> None:
    Outcome(Cause.PREEMPTED, Next.REQUEUE, 75, "earlier").write(attempt(run, 1))
    assert aftermath.main([str(run.path), str(code)]) == 75
    said = Outcome.read(run.all_attempts()[1])
    assert said is not None
    assert (said.cause, said.next, said.delay) == (Cause.LAUNCH_FAILED, Next.REQUEUE, 20.0)
    assert said.reason == f"the supervisor was ended by {how} before it could begin"
    assert requeues(fake_slurm) == ["requeue 7"]


def test_starts_that_always_fail_so_use_up_their_budget(run: RunDir, fake_slurm: Any) -> None:
    for _ in range(10):
        Outcome(Cause.LAUNCH_FAILED, Next.REQUEUE, 75, "earlier").write(attempt(run, 1))
    assert aftermath.main([str(run.path), "70"]) == 1
    assert requeues(fake_slurm) == []


@pytest.mark.parametrize("state", ["CANCELLED", "PENDING"])
def test_a_start_that_slurm_ended_needs_no_last_word(run: RunDir, fake_slurm: Any, state: str) -> None:
    fake_slurm.program("scontrol", SHOW.format(state))
    assert aftermath.main([str(run.path), "143"]) == 143
    assert run.all_attempts() == []
    assert requeues(fake_slurm) == []


def test_a_last_word_stands(run: RunDir, fake_slurm: Any) -> None:
    Outcome(Cause.CANCELLED, Next.NOTHING, 143, "cancelled").write(attempt(run, 2))
    # bash says 138 or 255 when a signal comes in the moment in which the supervisor ends.
    assert [aftermath.main([str(run.path), code]) for code in ("143", "138", "255")] == [143] * 3
    assert (len(run.all_attempts()), requeues(fake_slurm)) == (1, [])


def test_an_attempt_of_another_job_is_not_put_an_end_to(run: RunDir, fake_slurm: Any) -> None:
    new_submission(run, "sbatch", token="tok2").set_job("8")
    attempt(run, 0, job="8", submission=2)
    assert aftermath.main([str(run.path), "137"]) == 137
    assert (len(run.all_attempts()), requeues(fake_slurm)) == (1, [])


def test_an_exception_in_the_supervisor_is_a_crash_that_goes_on(
    run: RunDir, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(supervise, "Supervisor", stale)
    with pytest.raises(OSError, match="Stale"):
        supervise.main([str(run.path)])
    (mine,) = run.all_attempts()
    create_json(mine.start, {"job_id": "7", "restart_count": 2, "submission": 1})
    assert not mine.outcome.exists()
    assert aftermath.main([str(run.path), "70"]) == 75
    said = Outcome.read(mine)
    assert said is not None
    assert (said.cause, said.next) == (Cause.CRASH, Next.REQUEUE)
    assert said.reason == "the supervisor failed: OSError: [Errno 116] Stale file handle"
    assert "Stale file handle" in (said.traceback or "")
    assert requeues(fake_slurm) == ["requeue 7"]


def test_a_damaged_outcome_of_long_ago_keeps_nobody_from_going_on(run: RunDir) -> None:
    attempt(run, 0).outcome.write_text("{")
    assert end_already(run, submissions(run)) is None
    attempt(run, 2)
    assert aftermath.main([str(run.path), "137"]) == 75


def test_storage_that_does_not_answer_does_not_say_cancelled(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(_: Path) -> bool:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "exists", stale)
    assert not submissions(run)[0].is_cancelled


def test_a_job_in_another_s_place_that_could_not_be_noted_is_known_by_its_token(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_submission(run, "sbatch", token="refused")  # an sbatch that never got a job
    monkeypatch.setenv("STOKER_AFTER", "7")
    found = own_submission(run, "9", "7-1700000000")
    assert (found.number, found.mode, found.job_id) == (3, "chain", "9")
    assert (found.intention["after"], found.intention["token"]) == ("7", "7-1700000000")


def test_events_of_a_supervisor_that_said_nothing_are_no_failure(run: RunDir) -> None:
    mine = attempt(run, 2)
    EventLog(mine.events("supervisor"), "supervisor", 1).write("attempt_started")
    assert aftermath.main([str(run.path), "137"]) == 75
    said = Outcome.read(mine)
    assert said is not None
    assert said.reason == "the supervisor was ended by SIGKILL"
