"""Steps lost and time to the next new step, from generations written by hand."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for made_run

from made_run import add_steps, add_text, make_run, start_attempt
from stoker.launcher.rehearsal.measure import Cost, Pass, cost, passes, steps_lost


def did(attempt: int, first: int, last: int, begin: float, generation: int = 1) -> Pass:
    """A generation that ends its first step at `begin` and one more each second."""
    return Pass(attempt, generation, tuple((step, begin + step - first) for step in range(first, last + 1)))


def test_an_undisturbed_run_lost_nothing_and_has_no_new_step() -> None:
    assert cost([did(1, 1, 40, 100.0)], event=110.0) == Cost(steps_lost=0, new_step=None, seconds=None)


def test_steps_after_the_checkpoint_are_lost_and_only_a_step_never_reached_is_new() -> None:
    found = [did(1, 1, 25, 100.0), did(2, 21, 40, 200.0)]
    assert cost(found, event=124.5) == Cost(steps_lost=5, new_step=26, seconds=80.5)


def test_a_stop_after_a_save_loses_nothing() -> None:
    found = [did(1, 1, 25, 100.0), did(2, 26, 40, 200.0)]
    assert cost(found, event=120.0) == Cost(steps_lost=0, new_step=26, seconds=80.0)


def test_steps_that_the_victims_still_finish_are_not_the_new_ones() -> None:
    # The event comes at step 21, the stop at 25: what counts is the first step of those who go on.
    assert cost([did(1, 1, 25, 100.0), did(1, 24, 30, 130.0, 2)], event=120.5).new_step == 26


def test_before_the_first_step_any_step_is_new() -> None:
    assert cost([did(2, 1, 3, 60.0)], event=50.0) == Cost(steps_lost=0, new_step=1, seconds=10.0)


def test_a_step_lost_twice_counts_twice() -> None:
    assert steps_lost([did(1, 1, 25, 0.0), did(1, 21, 23, 50.0, 2), did(2, 21, 40, 90.0)]) == 5 + 3


def test_a_run_that_begins_again_from_nothing_lost_all() -> None:
    assert cost([did(1, 1, 7, 0.0), did(1, 1, 9, 50.0, 2)], event=7.0) == Cost(7, 8, 50.0)


def test_passes_are_read_by_attempt_and_generation_without_the_empty_ones(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first = start_attempt(run, 1, 3, time=10.0)
    add_text(first, "", generation=2)
    add_steps(first, 3, 3, generation=3, time=20.0)
    add_text(first, '{"step": 4, "lo', generation=3)
    start_attempt(run)
    start_attempt(run, 4, 4, time=30.0)
    assert passes(run) == [
        Pass(1, 1, ((1, 10.0), (2, 10.0), (3, 10.0))),
        Pass(1, 3, ((3, 20.0),)),
        Pass(3, 1, ((4, 30.0),)),
    ]
