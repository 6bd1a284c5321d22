"""The watch on run directories, with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher import cli, watch_fix
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.events import EventLog
from stoker.launcher.run.layout import AttemptDir, RunDir
from stoker.launcher.run.outcome import Cause, Next, Outcome
from stoker.launcher.run.submissions import new_submission, submissions
from stoker.launcher.track_notes import Notes
from stoker.launcher.watch_checks import Limits
from stoker.launcher.watch_facts import ask, gather, seconds_of
from stoker.launcher.watch_runs import look_once


def row(job: str, state: str, reason: str = "None", elapsed: str = "1:00:00", command: object = "/c") -> str:
    return f"printf '{job}\\x1f{state}\\x1f{elapsed}\\x1fn1\\x1f{reason}\\x1f/w\\x1fx\\x1f{command}\\n'\n"


def started(run: RunDir, job: str = "7", outcome: Outcome | None = None, submission: int = 1) -> AttemptDir:
    attempt = claim(run)
    attempt.start.write_text(json.dumps({"job_id": job, "nodes": "n1", "time": time.time(), "submission": submission}))
    EventLog(attempt.events("supervisor"), "supervisor", attempt.number).write("attempt_started")
    if outcome is not None:
        outcome.write(attempt)
    return attempt


@pytest.fixture
def run(make_run: Callable[..., RunDir]) -> RunDir:
    found = make_run("r")
    plain = json.loads(found.config_json.read_text())
    plain["resilience"] = {"continuation": "requeue"}
    plain["cluster"]["comment"] = None
    found.config_json.write_text(json.dumps(plain))
    new_submission(found, "sbatch", token="tok").set_job("7")
    return found


def watch(run: RunDir, *options: str) -> int:
    return cli.main(["watch", "--once", *options, str(run.path.parent)])


def age(attempt: AttemptDir, seconds: float) -> None:
    then = time.time() - seconds
    for path in attempt.path.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


def test_silent_and_zero_when_all_is_well(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    started(run)
    fake_slurm.program("squeue", row("7", "RUNNING"))
    assert watch(run) == 0
    assert capsys.readouterr().out == ""
    assert len(fake_slurm.calls("squeue")) == 1


def test_what_is_over_is_not_even_asked_for(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    started(run, outcome=Outcome(Cause.FINISHED, Next.NOTHING, 0, "all steps are done"))
    fake_slurm.program("squeue", "exit 1")
    assert watch(run) == 0
    assert fake_slurm.calls("squeue") == []


def test_a_held_job_is_released_and_no_more_than_three_times(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    fake_slurm.program("squeue", row("7", "PENDING", "launch_failed_requeued_held", "0:00"))
    fake_slurm.program("scontrol", "true")
    assert watch(run) == 1
    assert capsys.readouterr().out == "r: held: Slurm holds job 7: launch_failed_requeued_held\n"
    assert fake_slurm.calls("scontrol") == []
    for _ in range(3):
        assert watch(run, "--fix") == 1
        assert capsys.readouterr().out.endswith(" -> released job 7\n")
    assert watch(run, "--fix") == 1
    assert "held again after 3 releases" in capsys.readouterr().out
    assert fake_slurm.calls("scontrol") == ["release 7"] * 3


def test_what_a_person_holds_stays_held(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    fake_slurm.program("squeue", row("7", "PENDING", "JobHeldUser", "0:00"))
    assert watch(run, "--fix", "--json") == 1
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["check"], line["is_fixed"]) == ("held", None)


def test_a_headless_job_is_known_by_its_silence(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    attempt = started(run)
    fake_slurm.program("squeue", row("7", "RUNNING"))
    fake_slurm.program("sinfo", "echo n1 down*")
    age(attempt, 400.0)
    assert watch(run) == 1
    said = "r: headless: job 7 is RUNNING, but nothing of it has reported for 7 min (nodes: n1 down*)\n"
    assert capsys.readouterr().out == said
    # The supervisor's sign of life, without a line in the file.
    os.utime(attempt.events("supervisor"))
    assert watch(run) == 0
    # The job has only just started again; its supervisor is not up yet.
    age(attempt, 400.0)
    fake_slurm.program("squeue", row("7", "RUNNING", elapsed="0:20"))
    assert watch(run) == 0


@pytest.fixture
def chain(run: RunDir) -> RunDir:
    """Job 7 runs, job 8 waits behind it."""
    plain = json.loads(run.config_json.read_text())
    plain["resilience"]["continuation"] = "chain"
    run.config_json.write_text(json.dumps(plain))
    started(run)
    new_submission(run, "chain", after="7", token="tok2").set_job("8")
    return run


BEHIND = row("8", "PENDING", "Dependency", "0:00")


def test_a_chain_is_well_while_its_next_job_waits(chain: RunDir, fake_slurm: Any, capsys: Any) -> None:
    fake_slurm.program("squeue", row("7", "RUNNING") + BEHIND)
    assert watch(chain) == 0
    fake_slurm.program("squeue", row("7", "RUNNING") + row("8", "CANCELLED", "None", "0:00"))
    assert watch(chain, "--fix") == 1
    assert capsys.readouterr().out.startswith("r: chain: no next job waits; ")
    assert len(submissions(chain)) == 2  # the running job may still see to it


def test_of_a_headless_chain_both_jobs_end_before_it_is_resumed(chain: RunDir, fake_slurm: Any, capsys: Any) -> None:
    age(chain.attempt(1), 400.0)
    fake_slurm.program("squeue", f'[ -e "$(dirname "$0")/ended" ] || {{ {row("7", "RUNNING")}{BEHIND}}}')
    fake_slurm.program("scancel", 'touch "$(dirname "$0")/ended"')
    fake_slurm.program("sbatch", "echo 9")
    assert watch(chain, "--fix") == 1
    assert capsys.readouterr().out.endswith(" -> ended job 7; resumed: 9\n")
    assert fake_slurm.calls("scancel") == ["7 8"]
    assert [s.job_id for s in submissions(chain)] == ["7", "8", "9"]
    assert (chain.submissions / "0001.headless.json").exists()


def test_a_watch_that_died_between_ending_and_resuming_is_carried_on(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    started(run)
    (run.submissions / "0001.headless.json").write_text("{}")
    fake_slurm.program("squeue", row("7", "CANCELLED"))
    fake_slurm.program("sbatch", "echo 9")
    assert watch(run, "--fix") == 1
    assert capsys.readouterr().out.endswith(" -> resumed: 9\n")


def test_a_headless_job_that_spoke_when_it_was_ended_is_no_cancelled_run(
    run: RunDir, fake_slurm: Any, capsys: Any
) -> None:
    """Its supervisor woke up, asked Slurm, and wrote what it was told: that somebody had cancelled the job."""
    started(run, outcome=Outcome(Cause.CANCELLED, Next.NOTHING, 143, "cancelled (SIGTERM)"))
    (run.submissions / "0001.headless.json").write_text("{}")
    fake_slurm.program("squeue", row("7", "CANCELLED"))
    fake_slurm.program("sbatch", "echo 9")
    assert watch(run, "--fix") == 1
    assert capsys.readouterr().out.endswith(" -> resumed: 9\n")


def test_a_job_that_was_submitted_by_hand_goes_on_with_a_lost_run(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    started(run, outcome=REQUEUED)
    fake_slurm.program("squeue", row("9", "PENDING", "Priority", "0:00", command=run.script))
    assert watch(run, "--fix") == 0
    assert [s.job_id for s in submissions(run)] == ["7", "9"]


def test_a_clock_that_is_minutes_off_changes_no_age(
    run: RunDir, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only times that the file system gave are compared."""
    started(run)
    fake_slurm.program("squeue", row("7", "RUNNING"))
    now = time.time()
    for skew in (-900.0, 900.0):
        monkeypatch.setattr(time, "time", lambda skew=skew: now + skew)
        facts = gather(run, ask([run]), Limits())
        assert facts.silent is not None
        assert 0.0 <= facts.silent < 60.0


REQUEUED = Outcome(Cause.PREEMPTED, Next.REQUEUE, 75, "preempted")
ACCEPT = 'sleep 0.2; touch "$(dirname "$0")/sent"; echo 8'
AFTER = f'[ -e "$(dirname "$0")/sent" ] && {row("8", "PENDING", "Priority", "0:00")}true'


def test_an_interrupted_run_is_resumed_once_by_two_watchers(run: RunDir, fake_slurm: Any) -> None:
    started(run, outcome=REQUEUED)
    fake_slurm.program("squeue", AFTER)
    fake_slurm.program("sbatch", ACCEPT)
    stale = gather(run, ask([run]), Limits())
    assert stale.state.state.value == "INTERRUPTED"
    processes = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, processes) as pool:
        futures = [pool.submit(watch_fix.try_to, watch_fix.Fix.RESUME, run, stale) for _ in range(2)]
        done = sorted(future.result() for future in futures)
    assert [d[0] for d in done] == [False, True]
    assert done[1][1] == "resumed: 8"
    assert len(fake_slurm.calls("sbatch")) == 1
    assert [s.job_id for s in submissions(run)] == ["7", "8"]
    assert submissions(run)[1].intention["by"] == "watch"
    # Who looked before and comes later does nothing either.
    assert watch_fix.try_to(watch_fix.Fix.RESUME, run, stale) == (False, "somebody else has submitted it meanwhile")


def test_a_cancelled_run_stays_so(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    started(run, outcome=REQUEUED)
    fake_slurm.program("squeue", "true")
    facts = gather(run, ask([run]), Limits())
    submissions(run)[-1].cancel("test")
    assert watch(run, "--fix") == 0
    assert watch_fix.try_to(watch_fix.Fix.RESUME, run, facts) == (False, "it was cancelled meanwhile")
    assert len(submissions(run)) == 1


def test_what_scancel_ended_stays_so_where_accounting_tells(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    started(run, outcome=REQUEUED)
    fake_slurm.program("squeue", "true")
    fake_slurm.program("sacct", "echo 'CANCELLED by 0'")
    assert watch(run, "--fix") == 1
    assert "not fixed: job 7 was cancelled by scancel" in capsys.readouterr().out
    assert len(submissions(run)) == 1


def test_resuming_without_a_step_is_given_up(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    fake_slurm.program("squeue", "true")
    for number in range(1, 5):
        if number > 1:
            new_submission(run, "sbatch", token=str(number), by="watch").set_job(str(number + 6))
        started(run, str(number + 6), Outcome(Cause.NODE_FAILURE, Next.REQUEUE, 75, "lost"), number)
    assert watch(run, "--fix") == 1
    assert "resumed 3 times by the watch without a step" in capsys.readouterr().out
    assert len(submissions(run)) == 4


def test_events_of_the_last_hour_warn(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    attempt = started(run)
    EventLog(attempt.events("n1"), "n1", 1).write("checkpoint_failed", rank=0, error="No space left on device")
    fake_slurm.program("squeue", row("7", "RUNNING"))
    assert watch(run) == 1
    assert capsys.readouterr().out == "r: alert: checkpoint_failed: No space left on device\n"


def test_a_tracker_that_gave_up_is_told(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    started(run)
    run.report.mkdir()
    notes = Notes(run.report / "track.jsonl")
    fake_slurm.program("squeue", row("7", "RUNNING"))
    notes.write("opened", mode="online", sent=0)
    assert watch(run) == 0
    notes.write("gave_up", mode="online", sent=7, error="502 Bad Gateway")
    assert watch(run) == 1
    assert capsys.readouterr().out == "r: alert: tracker: 502 Bad Gateway (`stoker track` sends the rest)\n"


def test_a_damaged_run_hides_no_other_and_a_silent_slurm_is_told(run: RunDir, fake_slurm: Any, tmp_path: Path) -> None:
    broken = RunDir(tmp_path / "runs" / "broken")
    broken.submissions.mkdir(parents=True)
    broken.run.write_text("{}")
    fake_slurm.program("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    checks = [(line.run, line.check) for line in look_once([broken, run], Limits())]
    assert checks == [("Slurm", "no answer"), ("broken", "damaged")]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:00", 0.0), ("1:05", 65.0), ("2:03:04", 7384.0), ("1-02:03:04", 93784.0), ("INVALID", None), ("", None)],
)
def test_elapsed(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "option",
    ["--silence=-1", "--silence=nan", "--silence=59", "--silence=inf", "--every=-1", "--every=nan", "--every=1e300",
     "--stalled=0", "--pending=nan", "--pending=soon"],
)  # fmt: skip
def test_a_limit_that_would_end_healthy_jobs_is_refused_before_anything_is_asked(
    option: str, run: RunDir, fake_slurm: Any, capsys: Any
) -> None:
    started(run)
    fake_slurm.program("squeue", row("7", "RUNNING"))
    with pytest.raises(SystemExit) as end:
        watch(run, "--fix", option)
    assert end.value.code == 2
    assert f"argument {option.split('=')[0]}: {option.split('=')[1]}: expected " in capsys.readouterr().err
    assert fake_slurm.calls("squeue") == []


@pytest.mark.parametrize(("name", "text"), [("run.json", ""), ("config.json", '{"cluster": {')])
def test_torn_files_of_a_finished_run_are_told(name: str, text: str, run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    started(run, outcome=Outcome(Cause.FINISHED, Next.NOTHING, 0, "all steps are done"))
    (run.path / name).write_text(text)
    assert watch(run) == 1
    assert capsys.readouterr().out.startswith(f"r: damaged: {run.path / name}: not valid JSON")


def test_a_directory_that_may_not_be_read_is_told_and_hides_no_other(
    run: RunDir, fake_slurm: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = run.path.parent / "alien"
    locked.mkdir()
    stat = Path.stat

    def refuse(path: Path, **how: Any) -> os.stat_result:
        if locked in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", refuse)  # the tests may run as root, whom no mode keeps out
    started(run)
    fake_slurm.program("squeue", row("7", "PENDING", "JobHeldUser", "0:00"))
    assert watch(run) == 1
    told = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in told] == [["alien", "damaged"], ["r", "held"]]
    assert cli.main(["status", str(run.path.parent)]) == 0
    out, err = capsys.readouterr()
    assert f"{locked}: cannot be read: [Errno 13] Permission denied" in err
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["r", "HELD"]]


def test_a_directory_without_runs_is_not_taken_for_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["watch", "--once"]) != 0
    assert "no ./runs in" in capsys.readouterr().err
