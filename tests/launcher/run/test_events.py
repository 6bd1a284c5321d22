"""One line per event, with the common fields."""

from __future__ import annotations

from pathlib import Path

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
