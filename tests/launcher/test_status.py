"""What `stoker status` shows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher import cli, slurm
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.events import EventLog
from stoker.launcher.run.layout import AttemptDir, CheckpointName, RunDir
from stoker.launcher.run.outcome import Cause, Next, Outcome
from stoker.launcher.run.submissions import new_submission
from stoker.launcher.status import duration
from stoker.launcher.summary import summarize


def metric(step: int, when: float, loss: float = 2.5) -> str:
    return json.dumps({"step": step, "loss": loss, "tokens_per_second": 12345.6, "time": when}) + "\n"


def attempt(run: RunDir, steps: range, when: float, submission: int = 1, job: str | None = "7") -> AttemptDir:
    a = claim(run)
    start = {"job_id": job, "nodes": "n[1-2]", "time": when - 100, "submission": submission}
    a.start.write_text(json.dumps(start))
    a.metrics(1).write_text("".join(metric(s, when) for s in steps))
    return a


@pytest.fixture
def running(make_run: Callable[..., RunDir]) -> RunDir:
    """Requeued once: steps 1-6, then 5-8 of 10; a checkpoint at 4 and a directory that is none."""
    run = make_run("llama-1")
    new_submission(run, "sbatch").set_job("7")
    first = attempt(run, range(1, 7), time.time() - 500)
    Outcome(Cause.NODE_FAILURE, Next.REQUEUE, 75, "node n2 went down", step=6, rank=3, node="n2").write(first)
    attempt(run, range(5, 9), time.time() - 300)
    for name in (CheckpointName(4, 1), CheckpointName(6, 2)):
        run.checkpoint(name).mkdir()
    (run.checkpoint(CheckpointName(4, 1)) / "manifest.json").write_text("{}")
    return run


def queue(state: str, reason: str = "None", job: str = "7") -> str:
    return f"printf '{job}\\x1f{state}\\x1f1:00\\x1fn[1-2]\\x1f{reason}\\x1f/w\\x1fx\\x1f/c\\n'"


def test_table(running: RunDir, fake_slurm: Any, capsys: Any, tmp_path: Path) -> None:
    fake_slurm.program("squeue", queue("RUNNING"))
    assert cli.main(["status", str(tmp_path / "runs")]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == ["RUN", "STATE", "ATTEMPT", "STEP", "LOSS", "TOKENS/S", "CHECKPOINT", "PROGRESS"]
    assert line.split() == ["llama-1", "RUNNING", "2", "8/10", "2.5000", "12,346", "4", "5", "min", "ago"]


def test_a_squeue_that_hangs_is_not_waited_for(
    running: RunDir, fake_slurm: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "AT_ONCE", 0.5)
    fake_slurm.program("squeue", "exec sleep 300")  # itself: a child would outlive it
    fake_slurm.program("sbatch", "true")
    assert cli.main(["status", str(running.path)]) == 0
    said = capsys.readouterr()
    assert "Slurm does not answer; what follows is from the files alone" in said.err
    assert "step 8/10" in said.out


def test_what_a_node_lacks_is_told_while_the_run_runs(running: RunDir, fake_slurm: Any, capsys: Any) -> None:
    events = running.all_attempts()[-1].events("supervisor")
    EventLog(events, "supervisor", 2).write("no_scontrol", consequence="this job cannot be requeued from inside")
    fake_slurm.program("squeue", queue("RUNNING"))
    assert cli.main(["status", str(running.path)]) == 0
    assert "warning     no scontrol on its first node: this job cannot be requeued" in capsys.readouterr().out


def test_progress_said_by_a_clock_that_is_ahead_is_taken_from_the_file(
    running: RunDir, fake_slurm: Any, capsys: Any
) -> None:
    path = running.all_attempts()[-1].metrics(1)
    path.write_text(metric(9, time.time() + 500))
    os.utime(path, (time.time() - 200, time.time() - 200))
    fake_slurm.program("squeue", queue("RUNNING"))
    assert cli.main(["status", str(running.path)]) == 0
    assert "3 min ago" in capsys.readouterr().out


def test_default_is_the_runs_below_here(
    running: RunDir, fake_slurm: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["status"]) == 0
    assert "llama-1  UNKNOWN" in capsys.readouterr().out


def test_one_call_of_squeue_for_all_runs(
    running: RunDir, make_run: Callable[..., RunDir], fake_slurm: Any, tmp_path: Path, capsys: Any
) -> None:
    for number in range(8, 12):
        new_submission(make_run(f"other-{number}"), "sbatch").set_job(str(number))
    fake_slurm.program("squeue", queue("PENDING", "Priority", job="9"))
    assert cli.main(["status", str(tmp_path / "runs")]) == 0
    assert len(fake_slurm.calls("squeue")) == 1
    assert "other-9   PENDING" in capsys.readouterr().out


def test_one_run_gets_one_screen(running: RunDir, fake_slurm: Any, capsys: Any) -> None:
    fake_slurm.program("squeue", queue("RUNNING"))
    assert cli.main(["status", str(running.path)]) == 0
    out = capsys.readouterr().out
    assert f"directory   {running.path}\nstate       RUNNING\njob         7\n" in out
    assert "progress    step 8/10, loss 2.5000, 12,346 tokens/s, 5 min ago\ncheckpoint  step 4\n" in out
    rows = [line.split() for line in out.splitlines()[-2:]]
    assert rows[0][0] == "1"
    assert rows[0][4:] == ["1-6", "7", "n[1-2]", "node_failure", "rank", "3,", "n2:", "node", "n2", "went", "down"]
    assert rows[1][4:] == ["5-8", "7", "n[1-2]", "running"]


def test_without_slurm_the_files_are_shown(running: RunDir, fake_slurm: Any, capsys: Any) -> None:
    assert cli.main(["status", str(running.path)]) == 0
    assert "state       UNKNOWN Slurm does not answer here" in capsys.readouterr().out


def test_held_and_requeued_are_said_plainly(running: RunDir, fake_slurm: Any, capsys: Any) -> None:
    fake_slurm.program("squeue", queue("PENDING", "launch_failed_requeued_held"))
    assert cli.main(["status", str(running.path)]) == 0
    assert "HELD launch_failed_requeued_held: `scontrol release 7` lets it go on" in capsys.readouterr().out
    fake_slurm.program("squeue", queue("PENDING", "BeginTime"))
    assert cli.main(["status", str(running.path)]) == 0
    assert "state       REQUEUED BeginTime" in capsys.readouterr().out


def test_json(running: RunDir, fake_slurm: Any, capsys: Any) -> None:
    fake_slurm.program("squeue", queue("RUNNING"))
    assert cli.main(["status", "--json", str(running.path)]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["total"], found["checkpoint"]) == ("RUNNING", 8, 10, 4)
    assert [a["cause"] for a in found["attempts"]] == ["node_failure", None]


def test_job_id_finds_the_run_by_slurm_s_working_directory(running: RunDir, fake_slurm: Any, capsys: Any) -> None:
    fake_slurm.program("squeue", queue("RUNNING").replace("/w", str(running.path)))
    assert cli.main(["status", "7"]) == 0
    assert f"directory   {running.path}" in capsys.readouterr().out


def test_job_id_finds_the_run_by_its_files(
    running: RunDir, fake_slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["status", "7"]) == 0
    assert f"directory   {running.path}" in capsys.readouterr().out


@pytest.mark.parametrize(("what", "text"), [("nowhere", "nowhere: no run directory"), ("99", "job 99: no run below")])
def test_what_names_nothing_is_an_error(what: str, text: str, fake_slurm: Any, tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["status", what]) == 2
    assert text in capsys.readouterr().err


def test_torn_and_strange_files_do_not_matter(running: RunDir, fake_slurm: Any) -> None:
    with open(running.attempt(2).metrics(1), "a") as f:
        f.write('{"step": 9, "loss"')
    (running.attempts / "notes").mkdir()
    (running.path / "submissions" / "0002.config.json").write_text("{ torn")
    found = summarize(running, {})
    assert (found.step, found.total) == (8, None)


def test_a_long_run_costs_no_more_than_a_short_one(running: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    path = running.attempt(2).metrics(1)
    with open(path, "a") as f:
        for step in range(9, 20009):
            f.write(metric(step, 1.0))
    reads: list[int] = []
    original = json.loads
    monkeypatch.setattr(json, "loads", lambda text: reads.append(1) or original(text))
    assert summarize(running, {}).step == 20008
    assert len(reads) < 1000


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (3.4, "3 s"), (300, "5 min"), (7600, "2.1 h"), (302400, "3.5 d")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_one_damaged_run_hides_no_other(make_run: Any, capsys: Any) -> None:
    good, bad, odd = make_run("good"), make_run("bad"), make_run("odd")
    (bad.submissions).mkdir(exist_ok=True)
    (bad.submissions / "0001.json").write_text("{")
    new_submission(odd, "local")
    attempt(odd, range(1, 3), time.time(), job=None)
    odd.attempt(1).outcome.write_text('{"cause": "martian", "next": "nothing"}')
    assert cli.main(["status", str(good.path.parent)]) == 0
    out, err = capsys.readouterr()
    assert good.path.name in out
    assert f"{bad.path}: cannot be read: " in err
    assert f"{odd.path}: cannot be read: {odd.attempt(1).outcome}: not an outcome that this version knows" in err
    assert cli.main(["status", str(bad.path)]) == 1
