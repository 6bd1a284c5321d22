"""Which steps a tracker sends, in which order and with which rewinds, from metrics files written by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for the module below

from made_run import add_steps, add_text, end_attempt, finish, line, make_run, start_attempt
from stoker.launcher.run import views
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.outcome import Cause, Next
from stoker.launcher.run.submissions import new_submission, submissions
from stoker.launcher.track_feed import Feed, Rewind, Row, final_outcome
from stoker.launcher.track_values import public_config, public_identity, values_of


def taken(feed: Feed, is_over: bool = False) -> list[tuple[int, int]]:
    """(step, attempt) of what is new."""
    return [(row.step, row.attempt) for row in feed.take(is_over)]


def numbers(feed: Feed, is_over: bool = False) -> list[int]:
    return [row.step for row in feed.take(is_over)]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


def test_each_take_gives_only_what_is_new(run: RunDir) -> None:
    attempt = start_attempt(run, 1, 3)
    feed = Feed(run, 0)
    assert numbers(feed) == [1, 2, 3]
    assert numbers(feed) == []
    add_steps(attempt, 4, 5)
    assert numbers(feed) == [4, 5]


def test_steps_sent_by_an_earlier_tracker_are_left_out(run: RunDir) -> None:
    start_attempt(run, 1, 5)
    assert numbers(Feed(run, 3)) == [4, 5]


def test_a_torn_last_line_is_waited_for(run: RunDir) -> None:
    attempt = start_attempt(run, 1, 2)
    feed = Feed(run, 0)
    torn = line(3)
    for part in (torn[:1], torn[1:-1]):
        add_text(attempt, part)
        assert numbers(feed) in ([1, 2], [])
    add_text(attempt, torn[-1:])
    assert numbers(feed) == [3]


def test_a_torn_line_that_was_closed_is_passed_over(run: RunDir) -> None:
    attempt = start_attempt(run, 1, 2)
    add_text(attempt, line(3)[:20] + "\n" + line(3) + "[1]\n" + line(4))
    assert numbers(Feed(run, 0)) == [1, 2, 3, 4]


def test_steps_done_again_are_not_sent_again_and_the_first_new_one_says_so(run: RunDir) -> None:
    end_attempt(start_attempt(run, 1, 10), Cause.NODE_FAILURE)
    feed = Feed(run, 0)
    assert numbers(feed) == list(range(1, 11))
    start_attempt(run, 6, 12)
    rows = list(feed.take())
    rewind = Rewind(number=1, attempt=2, from_step=10, to_step=5)
    assert [(r.step, r.rewinds) for r in rows] == [(11, (rewind,)), (12, ())]
    assert rewind.steps == 5
    assert feed.rewinds == [rewind]


@pytest.mark.parametrize(("sent", "marked"), [(0, [11]), (8, [11]), (10, [11]), (11, []), (20, [])])
def test_a_rewind_is_marked_once_wherever_a_tracker_starts_again(run: RunDir, sent: int, marked: list[int]) -> None:
    start_attempt(run, 1, 10)
    start_attempt(run, 6, 12)
    assert [r.step for r in Feed(run, sent).take() if r.rewinds] == marked


def test_a_tracker_that_comes_late_sends_the_lines_that_count(run: RunDir) -> None:
    start_attempt(run, 1, 5)
    start_attempt(run, 4, 8)
    assert taken(Feed(run, 0)) == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2), (7, 2), (8, 2)]


def test_a_restart_in_place_is_a_rewind_too(run: RunDir) -> None:
    attempt = start_attempt(run, 1, 10)
    add_steps(attempt, 8, 11, generation=2)
    rows = list(Feed(run, 0).take())
    assert [(r.step, r.generation) for r in rows[6:]] == [(7, 1), (8, 2), (9, 2), (10, 2), (11, 2)]
    assert rows[-1].rewinds == (Rewind(1, 1, 10, 7),)


def test_two_rewinds_before_a_new_step_are_marked_together(run: RunDir) -> None:
    for first, last in ((1, 10), (6, 8), (4, 11)):
        start_attempt(run, first, last)
    (marked,) = [r for r in Feed(run, 0).take() if r.rewinds]
    assert marked.step == 11
    assert [(r.number, r.from_step, r.to_step) for r in marked.rewinds] == [(1, 10, 5), (2, 10, 3)]


def test_unsent_steps_wait_until_a_new_attempt_shows_where_it_starts(run: RunDir) -> None:
    first = start_attempt(run, 1, 4)
    feed = Feed(run, 0)
    assert numbers(feed) == [1, 2, 3, 4]
    add_steps(first, 5, 8)
    second = start_attempt(run)
    assert taken(feed) == []
    add_text(second, line(7)[:-1])
    assert taken(feed) == []
    add_text(second, "\n")
    assert taken(feed) == [(5, 1), (6, 1), (7, 2)]


def test_what_a_cut_off_attempt_still_writes_is_not_sent(run: RunDir) -> None:
    first = start_attempt(run, 1, 4)
    start_attempt(run, 3, 5)
    feed = Feed(run, 0)
    assert taken(feed)[-1] == (5, 2)
    add_steps(first, 5, 9)
    assert taken(feed) == []


def test_when_nothing_follows_steps_that_none_did_again_count(run: RunDir) -> None:
    start_attempt(run, 1, 8)
    second = start_attempt(run, 3, 5)
    feed = Feed(run, 0)
    assert numbers(feed) == [1, 2, 3, 4, 5]
    end_attempt(second, Cause.DIVERGED, Next.NOTHING, 1)
    assert taken(feed, is_over=True) == [(6, 1), (7, 1), (8, 1)]


_LENGTHS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 8)), min_size=1, max_size=5)


@settings(max_examples=30)
@given(_LENGTHS, st.integers(0, 30))
def test_a_late_tracker_sends_exactly_the_view(
    tmp_path_factory: pytest.TempPathFactory, shape: list[tuple[int, int]], sent: int
) -> None:
    run = make_run(tmp_path_factory.mktemp("view"))
    reached = 0
    for back, length in shape:
        first = max(0, reached - back) + 1
        start_attempt(run, first, first + length - 1)
        reached = first + length - 1
    view = [(r["step"], r["attempt"]) for r in views.metrics(run) if r["step"] > sent]
    assert taken(Feed(run, sent), is_over=True) == view


@settings(max_examples=30)
@given(_LENGTHS, st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_a_live_tracker_that_is_killed_now_and_then_sends_every_step_once(
    tmp_path_factory: pytest.TempPathFactory, shape: list[tuple[int, int]], looks: list[int]
) -> None:
    run = make_run(tmp_path_factory.mktemp("live"))
    feed, seen, reached, clock = Feed(run, 0), [], 0, 0
    marked: list[int] = []
    for back, length in shape:
        first = max(0, reached - back) + 1
        attempt = start_attempt(run)
        for step in range(first, first + length):
            add_steps(attempt, step, step)
            clock += 1
            if clock % looks[clock % len(looks)] == 0:
                rows = list(feed.take())
                seen += [r.step for r in rows]
                marked += [n.number for r in rows for n in r.rewinds]
                feed = Feed(run, seen[-1] if seen else 0)
        reached = first + length - 1
    rows = list(feed.take(is_over=True))
    seen += [r.step for r in rows]
    marked += [n.number for r in rows for n in r.rewinds]
    assert seen == [r["step"] for r in views.metrics(run)]
    assert marked == sorted(set(marked))


def test_a_run_is_over_when_its_newest_attempt_says_so(run: RunDir) -> None:
    assert final_outcome(run) is None
    first = start_attempt(run, 1, 2)
    assert final_outcome(run) is None
    end_attempt(first, Cause.TIME_LIMIT)
    assert final_outcome(run) is None
    second = start_attempt(run, 2, 3)
    finish(second)
    outcome = final_outcome(run)
    assert outcome is not None
    assert outcome.cause is Cause.FINISHED


def test_a_resumed_run_is_not_over(run: RunDir) -> None:
    end_attempt(start_attempt(run, 1, 2), Cause.CRASH, Next.NOTHING, 1)
    assert final_outcome(run) is not None
    new_submission(run, "sbatch")
    assert final_outcome(run) is None


def test_a_run_cancelled_between_attempts_is_over(run: RunDir) -> None:
    attempt = start_attempt(run, 1, 2)
    submissions(run)[-1].cancel("test")
    assert final_outcome(run) is None  # it may still save
    end_attempt(attempt, Cause.TIME_LIMIT)
    outcome = final_outcome(run)
    assert outcome is not None
    assert outcome.cause is Cause.CANCELLED


def test_values_are_every_number_of_a_line() -> None:
    record = {"step": 7, "loss": 0.5, "tokens": 2048, "mfu": None, "grad_norm": None, "time": 1700.5, "is_warm": True}
    row = Row(7, 2, 1, record | {"parts": {"data": 0.1, "save": 0.0}, "eval_loss": 0.75})
    values = values_of(row)
    assert math.isnan(values.pop("grad_norm"))  # null: it was not finite
    assert values == {
        "attempt": 2,
        "generation": 1,
        "loss": 0.5,
        "tokens": 2048,
        "parts/data": 0.1,
        "parts/save": 0.0,
        "eval_loss": 0.75,
        "_timestamp": 1700.5,
    }


def test_values_after_rewinds_say_how_many_steps_were_done_again() -> None:
    row = Row(11, 3, 1, {"step": 11}, (Rewind(1, 2, 10, 5), Rewind(2, 3, 10, 3)))
    expected = {"attempt": 3, "generation": 1, "rewind/count": 2, "rewind/steps": 12, "rewind/to_step": 3}
    assert values_of(row) == expected


def test_the_configuration_is_sent_without_keys() -> None:
    setup = ["module load cuda", "export HF_TOKEN=hf_abc", "export HF_TOKEN=$(cat ~/token)"]
    cluster = {"env": {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "abc"}, "setup": setup, "nodes": 2}
    sent = public_config({"seed": 1, "cluster": cluster})
    assert sent["cluster"]["env"] == {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "(not sent)"}
    assert sent["cluster"]["setup"] == ["module load cuda", "(not sent)", "export HF_TOKEN=$(cat ~/token)"]
    assert (sent["seed"], sent["cluster"]["nodes"]) == (1, 2)
    assert cluster["env"]["WANDB_API_KEY"] == "abc"


def test_the_command_line_is_not_sent(run: RunDir) -> None:
    identity = {"id": "x", "command": "stoker launch data.password=hunter2", "git": {"sha": "abc"}}
    assert public_identity(identity, run) == {"directory": str(run.path), "id": "x", "git": {"sha": "abc"}}
