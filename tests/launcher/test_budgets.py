"""Starting again: what counts against which budget, and how long the pause is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stoker.conf.budgets import BUDGETS
from stoker.launcher import budgets
from stoker.launcher.budgets import Past, delay, history, spent
from stoker.launcher.run.layout import AttemptDir, RunDir
from stoker.launcher.run.outcome import Cause

from .made_run import end_attempt, make_run, start_attempt

LIMITS = {"crash": 2, "preempted": 4, "launch_failed": 1, "hang": -1, "no_word": 1}


def past(text: str) -> list[Past]:
    """`crash crash+ ...`, oldest first; + for one that got further than all before it."""
    return [Past(word.rstrip("+"), word.endswith("+"), f"why {word}") for word in text.split()]


@pytest.mark.parametrize(
    ("attempts", "reason"),
    [
        ("", None),
        ("crash crash", None),
        ("crash crash crash", "3 attempts in a row made no progress and ended with crash (resilience.budgets.crash=2)"),
        ("crash crash+ crash", None),
        ("crash preempted crash preempted", None),  # neither uses up the other's
        ("crash preempted crash preempted crash", "3 attempts in a row"),  # and neither gives the other's back
        ("preempted preempted preempted preempted", None),
        ("hang " * 50, None),
        ("unheard_of " * 50, None),
        ("no_word no_word", "ended with no_word (resilience.budgets.no_word=1)"),
        ("launch_failed launch_failed preempted", "ended with launch_failed"),
    ],
)
def test_each_cause_has_a_budget_of_its_own(attempts: str, reason: str | None) -> None:
    found = spent(past(attempts), LIMITS)
    assert (reason in found) if reason and found else (found is reason)


@pytest.mark.parametrize(
    ("attempts", "seconds"),
    [
        ("", 0.0),
        ("launch_failed", 30.0),
        ("launch_failed launch_failed", 60.0),
        ("launch_failed preempted launch_failed", 60.0),
        ("launch_failed " * 40, 1800.0),
        ("launch_failed launch_failed+", 0.0),
        ("launch_failed preempted", 0.0),
        ("time_limit time_limit", 0.0),
        ("node_failure+", 0.0),
    ],
)
def test_failures_in_a_row_are_started_again_ever_later(attempts: str, seconds: float) -> None:
    assert delay(past(attempts), 30.0, 1800.0) == seconds


def test_progress_is_a_step_that_no_attempt_had_done(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempts = []
    for first, last, cause in [(1, 12, Cause.CRASH), (11, 12, Cause.CRASH), (11, 13, Cause.PREEMPTED), (0, 0, None)]:
        attempts.append(start_attempt(run, first, last))
        if cause is not None:
            end_attempt(attempts[-1], cause)
    found = history(run, attempts, {"resilience": {}})
    assert [(p.cause, p.has_progressed) for p in found] == [
        ("crash", True),
        ("crash", False),
        ("preempted", True),
        ("no_word", False),
    ]


def saving(run: RunDir, *saved: int | None, last: int = 0) -> list[AttemptDir]:
    """Attempts that ran into the time limit after they had saved at these steps."""
    attempts = []
    for step in saved:
        attempts.append(start_attempt(run, 1, step or last))
        end_attempt(attempts[-1], Cause.TIME_LIMIT, saved_step=step)
    return attempts


@pytest.mark.parametrize(
    ("saved", "progress"),
    [
        # The newest checkpoints were damaged: the way back to where it had been takes several attempts.
        ((10000, 3000, 4000, None, 5000), [True, False, True, False, True]),
        # One that is damaged each time leads nowhere.
        ((12, 12, 12), [True, False, False]),
        ((12, None, None), [True, False, False]),
    ],
)
def test_lost_ground_is_won_back_by_newer_checkpoints(tmp_path: Path, saved: Any, progress: list[bool]) -> None:
    run = make_run(tmp_path)
    attempts = saving(run, *saved, last=12)
    found = history(run, attempts, {"resilience": {}})
    assert [p.has_progressed for p in found] == progress
    # Begun anew behind the last one of an earlier series, as a person may want it.
    assert history(run, attempts[1:], {"resilience": {}})[0].has_progressed == (saved[1] is not None)


def test_a_checkpoint_counts_without_a_last_word_once_it_is_published(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    saving(run, 100)
    attempts = [start_attempt(run, 1, 30), start_attempt(run, 1, 40)]
    for step, attempt in ((20, 2), (30, 3)):
        (run.checkpoints / f"step-{step:08d}-a{attempt:04d}").mkdir()
    (run.checkpoints / "step-00000020-a0002" / "manifest.json").write_text("{}")
    assert [p.has_progressed for p in history(run, attempts, {"resilience": {}})] == [True, False]


@pytest.mark.parametrize(
    ("evidence", "progress"),
    [
        ({"generation": 1}, True),
        ({"generation": 0}, False),  # its processes were never started
        ({"generation": 2, "failed_stops": {"3": 1}}, False),  # it cannot save
    ],
)
def test_an_own_script_has_done_its_part_if_it_ran_and_stopped_in_order(
    tmp_path: Path, evidence: dict[str, Any], progress: bool
) -> None:
    run = make_run(tmp_path)
    attempt = start_attempt(run)
    end_attempt(attempt, Cause.TIME_LIMIT, evidence=evidence)
    assert history(run, [attempt], {"task": {"cmd": ["python", "x.py"]}})[0].has_progressed is progress


def test_an_own_script_that_tells_no_steps_is_not_fruitless_at_the_time_limit(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = start_attempt(run)
    end_attempt(attempt, Cause.TIME_LIMIT)
    assert history(run, [attempt], {"task": {"cmd": ["python", "x.py"]}})[0].has_progressed
    assert not history(run, [attempt], {"task": {"cmd": []}})[0].has_progressed


def test_own_budgets_stand_over_the_defaults() -> None:
    found = budgets.limits({"resilience": {"budgets": {"crash": 7}}})
    assert (found["crash"], found["preempted"]) == (7, 100)
    assert [name for name in BUDGETS if name not in {c.value for c in Cause}] == ["no_word"]
