"""`stoker resume` and `stoker cancel` of Slurm jobs, with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher import cli, resume
from stoker.launcher.errors import UserError
from stoker.launcher.process import ProcessId
from stoker.launcher.run import badnodes
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.effective import effective_config, effective_script
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.outcome import Cause, Next, Outcome
from stoker.launcher.run.process_start import start_ticks
from stoker.launcher.run.submissions import new_submission, next_number, own_submission, submissions

SCONTROL = (
    'case "$*" in *partition) echo "PartitionName=main Default=YES DefaultTime=NONE MaxNodes=UNLIMITED '
    'MaxTime=UNLIMITED State=UP TotalNodes=4";; esac'
)


def queue(job: str, state: str, comment: str = "x", workdir: object = "/w", command: object = "/c") -> str:
    cells = (job, state, "1:00", "n1", "None", workdir, comment, command)
    return "printf '" + r"\x1f".join(map(str, cells)) + r"\n'"


@pytest.fixture
def run(tokens: str, tmp_path: Path, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> RunDir:
    """Frozen by `stoker launch`, submitted as job 7, and ended by a crash at step 6 of 10."""
    monkeypatch.chdir(tmp_path)
    arguments = ["data=custom", f"data.sources.0.prefix={tokens}", "data.seq_len=64", "train.steps=10"]
    assert cli.main(["launch", "--no-submit", *arguments, f"--run-dir={tmp_path}/r"]) == 0
    found = RunDir(tmp_path / "r")
    new_submission(found, "sbatch", token="tok1").set_job("7")
    attempt = claim(found)
    attempt.start.write_text('{"submission": 1}')
    Outcome(Cause.CRASH, Next.NOTHING, 1, "boom").write(attempt)
    found.checkpoint(CheckpointName(6, 1)).mkdir()
    fake_slurm.program("squeue", "true")
    fake_slurm.program("scontrol", SCONTROL)
    fake_slurm.program("sbatch", "echo 8")
    monkeypatch.setattr(resume, "CLEARING", 0.2)
    capsys.readouterr()
    return found


def frozen_files(run: RunDir) -> dict[str, bytes]:
    names = ("config.json", "config.yaml", "submit.sbatch", "code.tar.gz", "run.json", "overrides.txt")
    return {name: (run.path / name).read_bytes() for name in names}


def test_resume_submits_the_same_script_again(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    before = frozen_files(run)
    assert cli.main(["resume", str(run.path)]) == 0
    assert frozen_files(run) == before
    assert [s.job_id for s in submissions(run)] == ["7", "8"]
    assert fake_slurm.calls("sbatch")[0].endswith(f" {run.path}/submit.sbatch")
    assert capsys.readouterr().out.startswith(f"run directory: {run.path}\njob:           8\n")


def test_bad_nodes_of_a_resume_are_recorded(run: RunDir, fake_slurm: Any) -> None:
    now = time.time()
    badnodes.note(
        badnodes.directory_of(run), badnodes.Finding("n3", "it hung", "hang", "another", 1, now, now + 3600.0)
    )
    assert cli.main(["resume", str(run.path)]) == 0
    assert submissions(run)[-1].intention["options"] == ["--exclude=n3"]
    assert " --exclude=n3 " in fake_slurm.calls("sbatch")[-1]


def test_changes_are_kept_beside_the_submission_and_hold_on(run: RunDir, fake_slurm: Any) -> None:
    before = frozen_files(run)
    assert cli.main(["resume", str(run.path), "--nodes", "2", "train.steps=20", "cluster.env={A: b}"]) == 0
    assert frozen_files(run) == before
    assert fake_slurm.calls("sbatch")[0].endswith(f" {run.path}/submissions/0002.sbatch")
    script = (run.submissions / "0002.sbatch").read_text()
    assert "#SBATCH --nodes=2\n" in script
    assert "export A=b\n" in script
    config = effective_config(run, 2)
    assert (config["cluster"]["nodes"], config["train"]["steps"], config["data"]["seq_len"]) == (2, 20, 64)
    assert effective_config(run, 1)["cluster"]["nodes"] == 1
    assert effective_config(run, 3) == config
    assert effective_script(run, 3) == run.submissions / "0002.sbatch"
    assert effective_script(run, 1) == run.script


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.hidden_size=8", "model.hidden_size: cannot change on resume"),
        ("train.global_batch=8", "train.global_batch: cannot change on resume"),
        ("cluster=local", "cluster: cannot change on resume"),
        ("~cluster.env.A", "~cluster.env.A: cannot change on resume"),
        ("cluster.nodez=2", "cluster.nodez: unknown key; did you mean cluster.nodes?"),
        ("cluster.nodes=two", "cluster.nodes=two"),
        ("cluster.nodes=9", "cluster.nodes=9: partition main has 4"),
        ("train.steps=6", "is at step 6 of train.steps=6; to train further"),
    ],
)
def test_wrong_changes_leave_no_trace(override: str, text: str, run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    files = sorted(p.name for p in run.submissions.iterdir())
    assert cli.main(["resume", str(run.path), override]) == 2
    assert text in capsys.readouterr().err
    assert sorted(p.name for p in run.submissions.iterdir()) == files
    assert fake_slurm.calls("sbatch") == []


def test_the_layout_may_change(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    changes = ["cluster.nodes=2", "parallel.tensor=2", "parallel.data=zero1", "memory.recompute=full"]
    assert cli.main(["resume", str(run.path), *changes]) == 0, capsys.readouterr().err
    config = effective_config(run, 2)
    assert (config["parallel"]["tensor"], config["parallel"]["data"]) == (2, "zero1")
    assert config["memory"]["recompute"] == "full"
    assert cli.main(["resume", str(run.path), "parallel.tensor=3"]) == 2
    assert "parallel.tensor=3: pipeline x context x tensor = 1 x 1 x 3 = 3 does not divide" in capsys.readouterr().err


def test_refused_by_slurm_leaves_no_trace(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    files = sorted(p.name for p in run.submissions.iterdir())
    fake_slurm.program("sbatch", "echo 'Invalid account' >&2; exit 1")
    assert cli.main(["resume", str(run.path), "cluster.nodes=2"]) == 1
    assert "sbatch refused the job: Invalid account" in capsys.readouterr().err
    assert sorted(p.name for p in run.submissions.iterdir()) == files


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "SUSPENDED"])
def test_resume_refuses_while_a_job_of_the_run_is_there(state: str, run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    fake_slurm.program("squeue", queue("7", state))
    assert cli.main(["resume", str(run.path)]) == 1
    assert "job 7 still works on it" in capsys.readouterr().err
    assert len(submissions(run)) == 1


def test_resume_finds_the_job_of_a_lost_answer(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    """sbatch timed out at the last resume, but the job had arrived."""
    new_submission(run, "sbatch", token="tok2")
    fake_slurm.program("squeue", queue("9", "PENDING", "stoker:tok2"))
    assert cli.main(["resume", str(run.path)]) == 1
    assert "job 9 still works on it" in capsys.readouterr().err
    assert submissions(run)[1].job_id == "9"


def test_a_job_that_was_submitted_by_hand_is_seen(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    """`sbatch submit.sbatch`: no file tells of it until it starts."""
    fake_slurm.program("squeue", queue("9", "PENDING", command=run.script))
    assert cli.main(["resume", str(run.path)]) == 1
    assert "job 9 still works on it (PENDING)" in capsys.readouterr().err
    assert [(s.mode, s.job_id) for s in submissions(run)] == [("sbatch", "7"), ("adopted", "9")]
    assert own_submission(run, "9").number == 2


def test_a_job_of_the_user_s_own_in_the_run_directory_is_left_alone(run: RunDir, fake_slurm: Any) -> None:
    new_submission(run, "sbatch", token="tok2")
    theirs = queue("9", "RUNNING", workdir=run.path, command=run.path / "eval.sh")
    fake_slurm.program("squeue", theirs)
    fake_slurm.program("scancel", "true")
    assert cli.main(["cancel", str(run.path)]) == 0
    assert cli.main(["resume", str(run.path)]) == 0
    assert [s.job_id for s in submissions(run)] == ["7", None, "8"]
    assert fake_slurm.calls("scancel") == []


def test_cancel_ends_what_was_submitted_by_hand_too(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    gone = f"[ -e {run.path}/gone ] || "
    known, stray = queue("7", "RUNNING"), queue("9", "PENDING", command=run.script)
    fake_slurm.program("squeue", f"{gone}{known}\n{gone}{stray}")
    fake_slurm.program("scancel", f"touch {run.path}/gone")
    assert cli.main(["cancel", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{run.path}: cancelled; job 7, job 9 ended\n"
    assert [s.is_cancelled for s in submissions(run)] == [True, True]


def test_a_stray_job_does_not_stand_for_a_run_that_another_one_works_on(run: RunDir, fake_slurm: Any) -> None:
    fake_slurm.program("squeue", queue("7", "RUNNING") + "\n" + queue("9", "PENDING", command=run.script))
    assert cli.main(["resume", str(run.path)]) == 1
    assert len(submissions(run)) == 1


def test_cancel_marks_what_is_over_so_that_nothing_rises_later(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    (run.attempt(1).outcome).unlink()
    Outcome(Cause.PREEMPTED, Next.REQUEUE, 75, "preempted").write(run.attempt(1))
    assert cli.main(["cancel", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{run.path}: INTERRUPTED already; nothing to cancel\n"
    assert submissions(run)[0].is_cancelled
    assert cli.main(["status", str(run.path)]) == 0
    assert "CANCELLED" in capsys.readouterr().out


def test_of_two_who_looked_at_the_same_state_only_one_submits(run: RunDir, fake_slurm: Any) -> None:
    number = next_number(run)
    resume.resume(run, [], number=number)
    fake_slurm.program("squeue", "true")  # that job has ended, too
    with pytest.raises(UserError, match="somebody else has just submitted it"):
        resume.resume(run, [], number=number)
    assert len(fake_slurm.calls("sbatch")) == 1


def test_resume_waits_for_nobody_who_is_still_at_it(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    """A submission may take minutes while the controller is away, and has no job until then."""
    with subprocess.Popen(["sleep", "60"]) as other:
        ticks = start_ticks(other.pid)
        assert ticks is not None
        at_it = ProcessId(os.uname().nodename, other.pid, ticks).record()
        new_submission(run, "sbatch", token="tok2", process=at_it)
        assert cli.main(["resume", str(run.path)]) == 1
        assert "somebody is just submitting it (submission 2)" in capsys.readouterr().err
        other.kill()
    assert cli.main(["resume", str(run.path)]) == 0  # it died before it was through
    assert len(fake_slurm.calls("sbatch")) == 1


def test_finished_run_needs_more_steps(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    second = claim(run)
    second.start.write_text('{"submission": 1}')
    Outcome(Cause.FINISHED, Next.NOTHING, 0, "done").write(second)
    run.checkpoint(CheckpointName(10, 2)).mkdir()
    assert cli.main(["resume", str(run.path)]) == 2
    assert "is at step 10 of train.steps=10; to train further: train.steps=N, N > 10" in capsys.readouterr().err
    assert cli.main(["resume", str(run.path), "train.steps=12"]) == 0


def test_never_submitted_run_can_be_started(run: RunDir, fake_slurm: Any) -> None:
    for path in run.submissions.iterdir():
        path.unlink()
    assert cli.main(["resume", str(run.path)]) == 0
    assert [s.job_id for s in submissions(run)] == ["8"]


def test_cancel_marks_first_and_waits_until_the_job_is_gone(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    (run.attempt(1).outcome).unlink()
    gone = '$(dirname "$0")/gone'
    fake_slurm.program("squeue", f'if [ ! -e "{gone}" ]; then {queue("7", "RUNNING")}; else touch "{gone}2"; fi')
    fake_slurm.program("scancel", f'test -e {run.submissions}/0001.cancel.json && touch "{gone}"')
    assert cli.main(["cancel", str(run.path)]) == 0
    assert fake_slurm.calls("scancel") == ["7"]
    assert capsys.readouterr().out == f"{run.path}: cancelled; job 7 ended\n"


def test_cancel_that_takes_too_long_says_so(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    fake_slurm.program("squeue", queue("7", "COMPLETING"))
    fake_slurm.program("scancel", "true")
    assert cli.main(["cancel", "--timeout", "0.5", str(run.path)]) == 1
    assert "marked as cancelled; job 7 did not end within 0.5 s" in capsys.readouterr().out


def test_cancel_refused_by_slurm_leaves_the_mark(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    fake_slurm.program("squeue", queue("7", "RUNNING"))
    fake_slurm.program("scancel", "echo 'Access/permission denied' >&2; exit 1")
    assert cli.main(["cancel", str(run.path)]) == 1
    err = capsys.readouterr().err
    assert "scancel 7: Access/permission denied" in err
    assert "will not start again" in err
    assert submissions(run)[0].is_cancelled


def test_cancel_of_a_run_without_submission(make_run: Callable[..., RunDir], fake_slurm: Any, capsys: Any) -> None:
    assert cli.main(["cancel", str(make_run().path)]) == 1
    assert "never submitted; there is nothing to cancel" in capsys.readouterr().err


def test_interrupted_and_cancelled_runs_say_how_to_go_on(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    second = claim(run)
    second.start.write_text(json.dumps({"submission": 1}))
    Outcome(Cause.PREEMPTED, Next.REQUEUE, 75, "preempted").write(second)
    assert cli.main(["status", str(run.path)]) == 0
    assert "INTERRUPTED after preempted, job 7 is no longer known to Slurm and was not" in capsys.readouterr().out
