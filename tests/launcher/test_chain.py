"""The successor of a running job: exactly one, found again, refused, withdrawn. Stand-ins for Slurm's commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher import chain
from stoker.launcher.aftermath import outcome_of
from stoker.launcher.chain import Chain, batch_environment, predecessor_was_cancelled
from stoker.launcher.policy_types import JobFate
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.events import EventLog
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.outcome import Cause, Next, Outcome
from stoker.launcher.run.submissions import new_submission, own_submission, submissions, successor_of
from stoker.launcher.supervise_start import end_already, job_at_work, without_scontrol

SHOW = 'echo "JobId=$4 JobState={} Reason=None"'
CONFIG = {"cluster": {"comment": "mine", "sbatch": {}}, "resilience": {"continuation": "chain"}}


@pytest.fixture
def run(make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch, fake_slurm: Any) -> RunDir:
    """Job 7 works on it."""
    found = make_run()
    new_submission(found, "sbatch", token="tok1").set_job("7")
    for program in ("sh", "sed"):
        (fake_slurm.directory / program).symlink_to(f"/bin/{program}")
    fake_slurm.program("squeue", "true")
    fake_slurm.program("scancel", "true")
    fake_slurm.program("scontrol", SHOW.format("PENDING"))
    fake_slurm.program("sbatch", "echo 8")
    return found


def events(run: RunDir) -> list[str]:
    path = run.path / "events.jsonl"
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


def begin(run: RunDir, exclude: str | None = None) -> Chain:
    found = Chain(submissions(run)[0], "7", CONFIG, EventLog(run.path / "events.jsonl", "supervisor", 1), exclude)
    found.begin()
    found.wait(30.0)
    return found


def test_one_successor_waits_behind_the_running_job(run: RunDir, fake_slurm: Any) -> None:
    mine = begin(run, exclude="n3,n4")
    (call,) = fake_slurm.calls("sbatch")
    token = successor_of(run, "7").intention["token"]  # type: ignore[union-attr]
    options = "--dependency=afterany:7 --exclude=n3,n4"
    assert sorted(call.split()) == sorted(f"--parsable {options} --comment=mine stoker:{token} {run.script}".split())
    assert [(s.mode, s.job_id) for s in submissions(run)] == [("sbatch", "7"), ("chain", "8")]
    assert mine.go_on({}, 5.0) is None
    assert events(run) == ["successor"]


def test_a_job_that_starts_once_more_finds_its_successor_again(run: RunDir, fake_slurm: Any) -> None:
    begin(run)
    begin(run)
    assert len(fake_slurm.calls("sbatch")) == 1
    fake_slurm.program("scontrol", SHOW.format("CANCELLED"))
    begin(run)
    assert len(fake_slurm.calls("sbatch")) == 2
    assert len(submissions(run)) == 3


def test_a_refused_successor_is_told_and_nothing_will_follow(run: RunDir, fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", "echo 'sbatch: error: Invalid qos' >&2; exit 1")
    mine = begin(run)
    assert events(run) == ["chain_broken"]
    assert "Invalid qos" in str(submissions(run)[1].refusal)
    error = mine.go_on({}, 10.0)
    assert error is not None
    assert "no successor was accepted (sbatch refused the job: sbatch: error: Invalid qos" in error
    assert len(fake_slurm.calls("sbatch")) == 2  # tried once more at the end


def test_a_limit_that_has_gone_by_the_end_does_not_break_the_chain(run: RunDir, fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1")
    mine = begin(run)
    fake_slurm.program("sbatch", "echo 8")
    assert mine.go_on({}, 10.0) is None
    assert submissions(run)[1].refusal is None
    assert len(submissions(run)) == 2


def test_without_sbatch_on_the_node_the_chain_is_broken_and_says_so(run: RunDir, fake_slurm: Any) -> None:
    (fake_slurm.directory / "sbatch").unlink()
    assert "sbatch is not installed on this node" in str(begin(run).go_on({}, 10.0))


def test_a_finished_run_withdraws_its_successor_marker_first(run: RunDir, fake_slurm: Any) -> None:
    mine = begin(run)
    fake_slurm.program("scancel", f"[ -e {run.submissions}/0002.cancel.json ] || touch {run.path}/too-early")
    mine.stop()
    assert fake_slurm.calls("scancel") == ["8"]
    assert not (run.path / "too-early").exists()
    assert own_submission(run, "8").is_cancelled


def test_a_successor_that_was_cancelled_by_hand_is_not_gone_on_with(run: RunDir, fake_slurm: Any) -> None:
    mine = begin(run)
    fake_slurm.program("scontrol", SHOW.format("CANCELLED"))
    assert mine.go_on({}, 5.0) == "the successor is not in the queue any more (job 8)"


FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
AWAY = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"


def test_a_successor_that_slurm_has_forgotten_is_not_gone_on_with_and_replaced(run: RunDir, fake_slurm: Any) -> None:
    mine = begin(run)
    fake_slurm.program("scontrol", FORGOTTEN)
    assert mine.go_on({}, 5.0) == "the successor is not in the queue any more (job 8)"
    fake_slurm.program("sbatch", "echo 9")
    begin(run)
    assert [s.job_id for s in submissions(run)] == ["7", "8", "9"]


def test_a_controller_that_is_away_says_nothing_of_the_successor(run: RunDir, fake_slurm: Any) -> None:
    mine = begin(run)
    fake_slurm.program("scontrol", AWAY)
    assert mine.go_on({}, 5.0) is None
    begin(run)
    assert len(fake_slurm.calls("sbatch")) == 1


def test_a_successor_that_may_be_queued_is_not_sent_again_before_slurm_answers(run: RunDir, fake_slurm: Any) -> None:
    """An earlier start of the job was killed between its request and the answer."""
    new_submission(run, "chain", after="7", token="tok2")
    fake_slurm.program("squeue", AWAY)
    mine = begin(run)
    assert fake_slurm.calls("sbatch") == []
    fake_slurm.program("squeue", r"printf '8\x1fPENDING\x1f0:00\x1f\x1fDependency\x1f/w\x1fstoker:tok2\x1f/c\n'")
    assert mine.go_on({}, 10.0) is None
    assert fake_slurm.calls("sbatch") == []
    assert submissions(run)[1].job_id == "8"


def test_no_kind_of_failure_ends_the_tries(run: RunDir, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(chain, "successor_of", lambda *_: 1 / 0)
        mine = begin(run)
    assert events(run) == ["chain_broken"]
    assert mine.go_on({}, 10.0) is None
    assert [s.job_id for s in submissions(run)] == ["7", "8"]


def test_haste_at_the_end_does_not_shorten_the_looks_for_a_lost_answer(run: RunDir, fake_slurm: Any) -> None:
    """Without pauses between them it might be sent again although it is on its way."""
    fake_slurm.program("sbatch", "echo 'sbatch: error: Invalid qos' >&2; exit 1")
    mine = begin(run)
    fake_slurm.program("sbatch", "echo 'Socket timed out' >&2; exit 1")
    for _ in range(3):
        assert mine.go_on({}, 0.3) is not None
    mine.stop()
    assert len(fake_slurm.calls("sbatch")) == 2


def test_a_successor_is_changed_while_it_waits(run: RunDir, fake_slurm: Any) -> None:
    mine = begin(run)
    assert mine.go_on({"ExcNodeList": "n3", "StartTime": "now+60"}, 5.0) is None
    assert fake_slurm.calls("scontrol")[-1] == "update jobid=8 ExcNodeList=n3 StartTime=now+60"


def test_a_cancelled_run_gets_no_successor(run: RunDir, fake_slurm: Any) -> None:
    submissions(run)[0].cancel("stoker cancel")
    begin(run)
    assert fake_slurm.calls("sbatch") == []


def test_the_environment_is_the_batch_script_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_SINCE", "1")
    assert batch_environment()["SET_SINCE"] == "1"
    monkeypatch.setattr(chain.os, "getppid", chain.os.getpid)  # /proc/PID/environ: as this process was started
    monkeypatch.setenv("STOKER_BATCH", str(chain.os.getpid()))
    found = batch_environment()
    assert "SET_SINCE" not in found
    assert "PATH" in found


@pytest.mark.parametrize(
    ("state", "is_cancelled"), [("CANCELLED", True), ("FAILED", False), ("TIMEOUT", False), ("NODE_FAIL", False)]
)
def test_only_a_cancelled_predecessor_stops_its_successor(state: str, is_cancelled: bool) -> None:
    assert predecessor_was_cancelled("7", lambda _: state) is is_cancelled
    assert not predecessor_was_cancelled("7", lambda _: None)


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ((Cause.FINISHED, Next.NOTHING, 0), 0),
        ((Cause.CANCELLED, Next.NOTHING, 143), 143),
        ((Cause.OUT_OF_MEMORY, Next.NOTHING, 1), 1),
        ((Cause.SUPERSEDED, Next.NOTHING, 1), None),
        ((Cause.TIME_LIMIT, Next.CHAIN, 75), None),
        (None, None),
    ],
)
def test_a_successor_that_starts_though_the_run_is_over_ends_with_its_code(
    ended: tuple[Cause, Next, int] | None, code: int | None, run: RunDir
) -> None:
    attempt = claim(run)
    attempt.start.write_text('{"submission": 1}')
    if ended is not None:
        Outcome(*ended, "why").write(attempt)
    mine = [submissions(run)[0], new_submission(run, "chain", after="7")]
    assert end_already(run, mine) == code


@pytest.mark.parametrize(
    ("cause", "evidence", "code"),
    [
        (Cause.FINISHED, {}, 0),
        (Cause.OUT_OF_MEMORY, {}, 1),
        (Cause.NO_PROGRESS, {}, 1),
        # Slurm starts it again after all: what it had taken the nodes for, or what was asked for and not answered.
        (Cause.PREEMPTED, {}, None),
        (Cause.CRASH, {"not_started": "scontrol requeue did not get through in 600 s"}, None),
    ],
)
def test_a_job_that_starts_again_after_the_run_s_last_word_does_not_run_it_again(
    cause: Cause, evidence: dict[str, str], code: int | None, run: RunDir
) -> None:
    """RequeueExit, or a requeue inside the preemption grace: a run that had failed would start over and over."""
    attempt = claim(run)
    attempt.start.write_text('{"submission": 1}')
    Outcome(cause, Next.NOTHING, code or 0, "why", evidence=dict(evidence)).write(attempt)
    assert end_already(run, submissions(run)) == code
    resumed = new_submission(run, "sbatch", token="tok2")
    assert end_already(run, [resumed]) is None
    submissions(run)[0].cancel("stoker cancel")
    assert end_already(run, submissions(run)[:1]) is not None


@pytest.mark.parametrize(
    ("state", "at_work"), [("RUNNING", "9"), ("COMPLETING", None), ("PENDING", None), ("GONE", None), (None, None)]
)
def test_a_job_that_starts_beside_one_at_work_leaves_it_the_run(
    state: str | None, at_work: str | None, run: RunDir
) -> None:
    """`sbatch submit.sbatch` by hand, or the successor of an attempt that was superseded."""
    assert job_at_work(run, "7", lambda _: "RUNNING") is None
    attempt = claim(run)
    assert job_at_work(run, "7", lambda _: "RUNNING") is None
    new_submission(run, "adopted").set_job("9")
    attempt.start.write_text('{"submission": 2, "job_id": "9"}')
    assert job_at_work(run, "7", lambda _: state) == at_work
    assert job_at_work(run, "9", lambda _: state) is None  # itself, started again
    Outcome(Cause.PREEMPTED, Next.REQUEUE, 75, "why").write(attempt)
    assert job_at_work(run, "7", lambda _: state) is None


def test_without_scontrol_a_chain_goes_on_and_a_requeue_does_not() -> None:
    assert "the next job, which goes on all the same" in without_scontrol(is_chain=True)
    assert "cannot be requeued from inside" in without_scontrol(is_chain=False)


def test_the_allocation_of_a_dead_stoker_run_does_not_work_on_it(run: RunDir) -> None:
    attempt = claim(run)
    new_submission(run, "salloc").set_job("9")
    attempt.start.write_text('{"submission": 2, "job_id": "9"}')
    assert job_at_work(run, "7", lambda _: "RUNNING") is None


@pytest.mark.parametrize(
    ("continuation", "is_batch", "fate", "cause", "then"),
    [
        ("requeue", True, JobFate.RUNNING, Cause.CRASH, Next.REQUEUE),
        ("chain", True, JobFate.RUNNING, Cause.CRASH, Next.CHAIN),
        ("chain", False, JobFate.RUNNING, Cause.CRASH, Next.REQUEUE),
        ("none", True, JobFate.RUNNING, Cause.CRASH, Next.NOTHING),
        ("requeue", True, JobFate.CANCELLED, Cause.CANCELLED, Next.NOTHING),
    ],
)
def test_a_killed_supervisor_s_last_word(
    continuation: str, is_batch: bool, fate: JobFate, cause: Cause, then: Next
) -> None:
    config = {"resilience": {"continuation": continuation}}
    outcome = outcome_of(137, config, False, fate, is_batch)
    assert (outcome.cause, outcome.next) == (cause, then)
    assert outcome.reason.startswith("the supervisor was ended by SIGKILL")
    assert outcome_of(137, config, True, fate, is_batch).cause is Cause.CANCELLED


def test_a_job_that_stands_in_for_one_of_a_chain_is_a_link_of_it(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_AFTER", "7")
    found = own_submission(run, "9")
    assert (found.mode, found.intention["after"], Path(found.run.path)) == ("chain", "7", run.path)
