"""What a job reads out of `scontrol show job` about its own fate."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.launcher import jobinfo
from stoker.launcher.policy_types import JobFate

RECORD = """JobId=7 JobName=x
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} {more}
"""


@pytest.mark.parametrize(
    ("state", "reason", "restarts", "more", "fate"),
    [
        ("RUNNING", "None", 1, "PreemptTime=None", JobFate.RUNNING),
        ("RUNNING", "None", 1, "PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=None", JobFate.RUNNING),
        ("RUNNING", "None", 1, "PreemptTime=2026-01-01T00:00:00", JobFate.PREEMPTED),
        ("SIGNALING", "None", 1, "PreemptTime=2026-01-01T00:00:00", JobFate.PREEMPTED),
        ("SIGNALING", "None", 1, "PreemptTime=None", JobFate.RUNNING),
        ("SOMETHING_NEW", "None", 1, "PreemptTime=None", JobFate.UNKNOWN),
        ("CANCELLED", "None", 1, "PreemptTime=None", JobFate.CANCELLED),
        ("COMPLETING", "None", 1, "", JobFate.CANCELLED),
        ("COMPLETING", "JobLaunchFailure", 1, "PreemptTime=None", JobFate.ENDED),  # kill -9 of the batch script
        ("RUNNING", "JobLaunchFailure", 1, "PreemptTime=None", JobFate.RUNNING),
        ("CANCELLED", "NonZeroExitCode", 1, "PreemptTime=None", JobFate.CANCELLED),
        ("COMPLETING", "None", 2, "", JobFate.REQUEUED),  # a requeue counts at once
        ("PENDING", "BeginTime", 2, "", JobFate.REQUEUED),
        ("REQUEUED", "None", 1, "", JobFate.REQUEUED),
        ("COMPLETING", "TimeLimit", 1, "", JobFate.TIME_LIMIT),
        ("TIMEOUT", "TimeLimit", 1, "", JobFate.TIME_LIMIT),
        ("NODE_FAIL", "NodeDown", 1, "", JobFate.NODE_FAIL),
        ("COMPLETING", "NodeDown", 1, "", JobFate.NODE_FAIL),
        ("PREEMPTED", "None", 1, "PreemptTime=2026-01-01T00:00:00", JobFate.TAKEN),  # PreemptMode=CANCEL
        ("COMPLETING", "None", 1, "PreemptTime=2026-01-01T00:00:00", JobFate.TAKEN),
        ("", "", 1, "", JobFate.UNKNOWN),
    ],
)
def test_fate(state: str, reason: str, restarts: int, more: str, fate: JobFate) -> None:
    info = jobinfo.parse(RECORD.format(state=state, reason=reason, restarts=restarts, more=more))
    assert jobinfo.fate(info, restarts=1) is fate


def test_times_are_utc_and_none_is_no_time() -> None:
    info = jobinfo.parse("JobId=7 EndTime=2026-11-30T12:00:00 PreemptTime=None StartTime=Unknown")
    assert info.time("EndTime") == 1796040000.0
    assert [info.time(n) for n in ("PreemptTime", "StartTime", "Absent")] == [None, None, None]


def test_the_end_is_reckoned_by_the_controller_s_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock stands in another year; 600 s of the limit are left there, whatever the time is here."""
    monkeypatch.setenv("TZ", "America/New_York")  # scontrol is asked for UTC all the same
    script = """case "$*" in
*config*) echo "Configuration data as of 2031-03-30T11:50:00"; exec sleep 0.1;;
*) [ "$TZ" = UTC0 ] && echo "JobId=7 JobState=RUNNING EndTime=2031-03-30T12:00:00";; esac"""
    fake_scontrol(tmp_path, monkeypatch, script)
    ask = jobinfo.Inquirer()
    for _ in range(2):
        info = ask("7")
        assert info is not None
        assert info.seconds_left is not None
        assert 597.0 < info.seconds_left < 600.0


def test_an_environment_for_a_job_is_left_alone() -> None:
    """sbatch hands it on: the next job of a chain must not find itself in another time zone."""
    done = jobinfo.command(["sh", "-c", "echo $TZ $SLURM_TIME_FORMAT"], env={"PATH": "/bin", "TZ": "Europe/Berlin"})
    assert done is not None
    assert done.stdout == "Europe/Berlin\n"


def test_a_controller_that_hides_its_clock_is_taken_to_share_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_scontrol(
        tmp_path,
        monkeypatch,
        'case "$*" in *config*) exit 1;; *) echo "JobId=7 EndTime=$(date -u -d @$(($(date +%s) + 600)) +%FT%T)";; esac',
    )
    info = jobinfo.Inquirer()("7")
    assert info is not None
    assert info.seconds_left == pytest.approx(600.0, abs=5.0)


def fake_scontrol(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = directory / "scontrol"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_a_requeue_survives_the_signal_that_answers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm signals the job's processes before `scontrol requeue`, one of them, has returned."""
    fake_scontrol(tmp_path, monkeypatch, "kill -TERM $$; exit 0")
    assert jobinfo.requeue("7", restarts=0) is None


def test_a_requeue_whose_answer_was_lost_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'case "$*" in *requeue*) exit 1;; *) echo "JobId=7 JobState=PENDING Reason=BeginTime Restarts=1";; esac'
    fake_scontrol(tmp_path, monkeypatch, script)
    assert jobinfo.requeue("7", restarts=0) is None


def test_a_refused_requeue_gives_slurms_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'case "$*" in *requeue*) echo "Requested operation is presently disabled" >&2; exit 1;; *) exit 1;; esac'
    fake_scontrol(tmp_path, monkeypatch, script)
    assert jobinfo.requeue("7", restarts=0) == "Requested operation is presently disabled"


def test_a_controller_that_is_away_is_asked_until_it_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tmp_path / "count"
    script = f"""echo x >> {count}
case "$*" in *requeue*) [ $(wc -l < {count}) -ge 4 ] && exit 0; echo "Unable to contact slurm controller" >&2;; esac
exit 1"""
    fake_scontrol(tmp_path, monkeypatch, script)
    assert jobinfo.requeue("7", restarts=0, patience=60.0) is None
    count.unlink()
    error = jobinfo.requeue("7", restarts=0, patience=0.0)
    assert error == "scontrol requeue did not get through in 0 s (last: Unable to contact slurm controller)"


def test_without_scontrol_the_requeue_is_told_to_be_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert jobinfo.requeue("7", restarts=0) == "scontrol is not installed on this node"
    assert jobinfo.query("7") is None
