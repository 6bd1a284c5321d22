"""One line per event, with the common fields."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.events import EventLog
from stoker.launcher.run.files import read_lines
from stoker.launcher.run.layout import RunDir


def test_events_carry_writer_attempt_and_time(tmp_path: Path) -> None:
    attempt = claim(RunDir(tmp_path))
    log = EventLog(attempt.events("node-1"), "node-1", attempt.number)
    log.write("warned", signal="USR1")
    log.write("checkpoint_saved", step=10)
    first, second = read_lines(tmp_path / "attempts" / "0001" / "events" / "node-1.jsonl")
    assert first.pop("time") <= second.pop("time")
    assert first == {"writer": "node-1", "attempt": 1, "event": "warned", "signal": "USR1"}
    assert second == {"writer": "node-1", "attempt": 1, "event": "checkpoint_saved", "step": 10}


def test_a_field_cannot_take_the_place_of_a_common_one(tmp_path: Path) -> None:
    EventLog(tmp_path / "e", "node-1", 2).write("exited", writer="other", attempt=9, code=3)
    (record,) = read_lines(tmp_path / "e")
    assert (record["writer"], record["attempt"], record["event"], record["code"]) == ("node-1", 2, "exited", 3)


def test_a_disk_that_refuses_costs_the_event_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    EventLog(tmp_path / "missing" / "e", "node-1", 1).write("warned")
    assert "event warned is not recorded" in capsys.readouterr().err
