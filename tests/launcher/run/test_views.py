"""What users read as one thing, merged from the files of all attempts."""

from __future__ import annotations

import json
import os
from pathlib import Path

from stoker.launcher.run import views
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.files import append_line
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.outcome import Cause, Next, Outcome


def lines(path: Path, *records: dict[str, object]) -> None:
    for record in records:
        append_line(path, json.dumps(record))


def test_of_two_lines_for_a_step_the_highest_attempt_and_generation_counts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first, second = claim(run), claim(run)
    lines(first.metrics(1), *({"step": s, "loss": 1.0} for s in (1, 2, 3, 4)))
    lines(first.metrics(2), {"step": 3, "loss": 2.0})
    lines(second.metrics(1), {"step": 2, "loss": 3.0}, {"note": "no step"})
    with second.metrics(1).open("a") as f:
        f.write('{"step": 1, "lo')
    assert views.metrics(run) == [
        {"step": 1, "loss": 1.0, "attempt": 1, "generation": 1},
        {"step": 2, "loss": 3.0, "attempt": 2, "generation": 1},
        {"step": 3, "loss": 2.0, "attempt": 1, "generation": 2},
        {"step": 4, "loss": 1.0, "attempt": 1, "generation": 1},
    ]


def test_events_go_by_attempt_and_time_and_a_clock_set_back_does_not_turn_a_writer_round(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first, second = claim(run), claim(run)
    lines(second.events("a"), {"time": 1.0, "event": "later attempt, wrong clock", "attempt": 2})
    lines(first.events("a"), {"time": 10.0, "event": "1"}, {"time": 5.0, "event": "2"}, {"time": 30.0, "event": "4"})
    lines(first.events("b"), {"time": 20.0, "event": "3"})
    assert [e["event"] for e in views.events(run)] == ["1", "2", "3", "4", "later attempt, wrong clock"]


def test_last_outcome(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert views.last_outcome(run) is None
    first = claim(run)
    assert views.last_outcome(run) == (first, None)
    outcome = Outcome(Cause.FINISHED, Next.NOTHING, 0, "done", time=1.0)
    outcome.write(first)
    assert views.last_outcome(run) == (first, outcome)
    assert views.last_outcome(run) != (claim(run), outcome)


def test_progress_is_a_step_or_what_an_attempt_left_among_the_checkpoints(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    attempts = [claim(run) for _ in range(4)]
    run.checkpoints.mkdir()
    for second, attempt in enumerate(attempts):
        attempt.start.write_text("{}")
        os.utime(attempt.start, (1000 * second, 1000 * second))

    def left(name: str, at: int) -> None:
        (run.checkpoints / name).touch()
        os.utime(run.checkpoints / name, (at, at))

    assert [views.made_progress(a) for a in attempts] == [False] * 4
    left("latest.pt", 1500)
    assert [views.made_progress(a) for a in attempts] == [False, True, False, False]
    left("latest.pt", 3500)  # replaced by the fourth; nobody looks back behind that
    assert [views.made_progress(a) for a in attempts] == [False, False, False, True]
    lines(attempts[2].metrics(1), {"step": 1})
    assert [views.made_progress(a) for a in attempts] == [False, False, True, True]
