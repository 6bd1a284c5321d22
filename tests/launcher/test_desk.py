"""Questions to Slurm: one RPC at a time, and nobody waits for it."""

from __future__ import annotations

import select
import threading

from stoker.launcher.desk import Desk, Question
from stoker.launcher.jobinfo import JobInfo, parse


def answers(desk: Desk, count: int) -> list[tuple[Question, JobInfo | None]]:
    found: list[tuple[Question, JobInfo | None]] = []
    while len(found) < count:
        assert select.select([desk.read_end], [], [], 10.0)[0]
        found += desk.answers()
    return found


def test_questions_that_come_during_an_rpc_share_the_next_one() -> None:
    going, calls = threading.Event(), []

    def slow(job: str) -> JobInfo:
        calls.append(job)
        assert going.wait(10.0)
        return parse(f"JobId=7 JobState=RUNNING Restarts={len(calls)}")

    desk = Desk("7", slow)
    desk.ask(Question("warning"))
    while not calls:
        pass
    for _ in range(100):
        desk.ask(Question("terminated", "agents"))
    desk.ask(Question("terminated", "batch"))
    assert desk.answers() == []
    going.set()
    found = {q: info.fields["Restarts"] for q, info in answers(desk, 3) if info}
    # What was asked after the first RPC began must not be answered by it.
    assert found == {
        Question("warning"): "1",
        Question("terminated", "agents"): "2",
        Question("terminated", "batch"): "2",
    }
    assert calls == ["7", "7"]


def test_no_answer_is_tried_once_more_and_then_said() -> None:
    calls = []
    desk = Desk("7", lambda job: calls.append(job))
    desk.ask(Question("start"))
    assert answers(desk, 1) == [(Question("start"), None)]
    assert calls == ["7", "7"]


def test_an_answer_that_cannot_be_read_is_none_and_the_desk_works_on() -> None:
    said: list[str] = ["7x", "7x"]

    def query(job: str) -> JobInfo:
        return parse(f"JobId=7 JobState=RUNNING Restarts={int(said.pop()) if said else 3}")

    desk = Desk("7", query)
    desk.ask(Question("start"))
    assert answers(desk, 1) == [(Question("start"), None)]
    desk.ask(Question("clock"))
    assert [info.fields["Restarts"] for _, info in answers(desk, 1) if info] == ["3"]
