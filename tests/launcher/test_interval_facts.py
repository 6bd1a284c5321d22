"""What a run's files say of the cost of its checkpoints and of its failures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from made_checkpoint import make_checkpoint
from stoker.launcher import cli, interval_facts
from stoker.launcher.interval_facts import advice
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import AttemptDir, RunDir
from stoker.launcher.run.outcome import Cause, Next, Outcome
from stoker.launcher.run.submissions import new_submission
from stoker.launcher.supervise import Supervisor

Make = Callable[..., RunDir]
SLOW = {101: 1.6, 102: 1.2, 201: 1.4}  # steps while checkpoints of steps 100 and 200 were written; others take 1 s


def start(run: RunDir) -> AttemptDir:
    attempt = claim(run)
    attempt.start.write_text(json.dumps({"submission": 1, "time": 1000.0}))
    attempt.metrics(1).write_text(
        "".join(
            json.dumps({"step": n, "step_seconds": SLOW.get(n, 1.0), "time": 1000.0 + n, "loss": 2.0}) + "\n"
            for n in range(1, 301)
        )
    )
    return attempt


def saved(attempt: AttemptDir, step: int, **fields: Any) -> None:
    with open(attempt.events("n1"), "a") as f:
        f.write(json.dumps({"time": 1000.0 + step, "event": "checkpoint_saved", "step": step} | fields) + "\n")


@pytest.fixture
def run(make_run: Make) -> RunDir:
    run = make_run("r1")
    cluster = {"kind": "slurm", "nodes": 4}
    run.config_json.write_text(json.dumps({"cluster": cluster, "checkpoint": {"interval": 100, "minutes": 0}}))
    new_submission(run, "sbatch").set_job("7")
    attempt = start(run)
    for step in (100, 200):
        saved(attempt, step, seconds=2.1, stall_seconds=0.1, wait_seconds=0.0)
    return run


def end(attempt: AttemptDir, cause: Cause, **fields: Any) -> None:
    Outcome(cause, Next.NOTHING, 1, "ended", time=2000.0, **fields).write(attempt)


def test_cost_is_the_stall_and_the_slower_steps(run: RunDir) -> None:
    found = advice(run)
    assert found is not None
    # 2 s of writing are steps 101, 102 (0.6 + 0.2 s more than usual) and 201, 202 (0.4 s more).
    assert found.cost == pytest.approx(0.1 + (0.8 + 0.4) / 2)
    assert (found.saves, found.durable, found.blocked) == (2, pytest.approx(2.1), pytest.approx(0.1))
    assert (found.set_steps, found.nodes, found.worked, found.failures) == (100, 4, 300.0, 0)


def test_a_save_that_was_waited_for_costs_all_of_it(run: RunDir) -> None:
    attempt = start(run)
    saved(attempt, 100, seconds=5.0)
    found = advice(run)
    assert found is not None
    assert (found.cost, found.durable, found.saves) == (5.0, 5.0, 1)  # the newest attempt's count


@pytest.mark.parametrize(
    ("cause", "fields", "failures"),
    [
        (Cause.NODE_FAILURE, {"step": 250, "saved_step": 200}, 1),
        (Cause.CRASH, {}, 1),
        (Cause.HANG, {}, 1),
        (Cause.PREEMPTED, {"step": 250, "saved_step": 200}, 1),
        (Cause.PREEMPTED, {"step": 250, "saved_step": 250}, 0),
        (Cause.TIME_LIMIT, {"step": 250, "saved_step": 250}, 0),
        (Cause.FINISHED, {}, 0),
        (Cause.CANCELLED, {"step": 250, "saved_step": 200}, 0),
    ],
)
def test_what_counts_as_a_failure(run: RunDir, cause: Cause, fields: Any, failures: int) -> None:
    end(run.attempt(1), cause, **fields)
    found = advice(run)
    assert found is not None
    assert (found.failures, found.worked) == (failures, 1000.0)


def test_an_end_without_a_word_and_workers_started_anew_are_failures(run: RunDir) -> None:
    run.attempt(1).metrics(2).write_text("")
    start(run)
    found = advice(run)
    assert found is not None
    assert found.failures == 2


def test_without_checkpoints_or_with_an_own_script_there_is_no_advice(make_run: Make, run: RunDir) -> None:
    assert advice(make_run("r2")) is None
    config = json.loads(run.config_json.read_text())
    run.config_json.write_text(json.dumps(config | {"task": {"cmd": ["x"]}}))
    assert advice(run) is None


def test_ls_and_report_show_it(run: RunDir, capsys: Any) -> None:
    make_checkpoint(run, 200)
    end(run.attempt(1), Cause.CRASH)
    assert cli.main(["checkpoint", "ls", str(run.path)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("interval: set 100 steps (100 s), which costs 0.7")
    assert "a failure every" in line
    assert cli.main(["report", str(run.path)]) == 0
    assert f"- {line}\n" in capsys.readouterr().out
    assert cli.main(["checkpoint", "ls", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["interval"]["failures"] == 1


class Log:
    """What of a supervisor `_advise` uses."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.events, self.written = run, self, []

    def write(self, event: str, **fields: Any) -> None:
        self.written.append((event, fields))


def test_the_supervisor_says_at_the_end_that_the_interval_is_far_off(run: RunDir, capsys: Any) -> None:
    saved(run.attempt(1), 290, seconds=2.1, stall_seconds=0.1, wait_seconds=0.0)
    log = Log(run)
    Supervisor._advise(log)  # type: ignore[arg-type]
    assert log.written == []  # five minutes: a trial
    end(run.attempt(1), Cause.CRASH)
    Supervisor._advise(log)  # type: ignore[arg-type]
    ((event, fields),) = log.written
    assert (event, fields["set_steps"], fields["saves"]) == ("checkpoint_interval", 100, 3)
    assert fields["steps"] > 200
    assert "supervisor: checkpoint interval: set 100 steps" in capsys.readouterr().out


def test_a_damaged_file_costs_the_advice_and_nothing_else(run: RunDir, capsys: Any) -> None:
    run.config_json.write_text("{")
    log = Log(run)
    Supervisor._advise(log)  # type: ignore[arg-type]
    assert log.written == []
    assert "how often to save is not known" in capsys.readouterr().out


def test_only_ends_of_files_are_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval_facts, "_END", 2000)
    found = advice(run)
    assert found is not None
    assert found.cost == pytest.approx(0.1)  # the slower steps are further back
