"""The best interval between checkpoints, against published figures and against a simulation of what it minimises."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from stoker.launcher.run.interval import (
    NODE_MTBF,
    Advice,
    History,
    Save,
    advise,
    daly,
    lost_share,
    sentence,
    slowed,
    young,
)

DAY, HOUR, MINUTE = 86400.0, 3600.0, 60.0


@pytest.mark.parametrize(("mtbf", "best"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_daly_s_own_examples(mtbf: float, best: float) -> None:
    """The captions of figures 3 to 5 of the paper: a dump takes 5 minutes."""
    assert daly(5 * MINUTE, mtbf) / MINUTE == pytest.approx(best, rel=0.006)


def test_first_order_where_cost_is_small() -> None:
    assert young(50.0, 10_000.0) == 1000.0
    assert daly(1e-3, DAY) == pytest.approx(young(1e-3, DAY), rel=1e-3)
    assert daly(3 * HOUR, HOUR) == HOUR  # saving takes longer than the machine lives


@pytest.mark.parametrize(("cost", "mtbf"), [(1.0, 1000.0), (30.0, 1000.0)])
def test_the_interval_loses_least_in_a_simulation(cost: float, mtbf: float) -> None:
    """Work is done in pieces of `interval`, each followed by a checkpoint; a failure undoes the piece at hand."""

    def efficiency(interval: float) -> float:
        rng = random.Random(0)
        clock, done, failure = 0.0, 0.0, rng.expovariate(1 / mtbf)
        while clock < 3000 * mtbf:
            if clock + interval + cost <= failure:
                clock += interval + cost
                done += interval
            else:
                clock, failure = failure, failure + rng.expovariate(1 / mtbf)
        return done / clock

    best = daly(cost, mtbf)
    here = efficiency(best)
    assert here > efficiency(best / 2)
    assert here > efficiency(best * 2)
    assert 1 - here == pytest.approx(lost_share(best, cost, mtbf), rel=0.15)


def history(**changes: object) -> History:
    return replace(History([Save(0.5, 20.0, 0.0)] * 4, 2.0, 10 * DAY, 9, 8), **changes)  # type: ignore[arg-type]


def test_advice_comes_with_its_numbers() -> None:
    found = advise(history(), 1000, 0)
    assert found is not None
    # One failure of the prior (264 days of a node, here of 8) and nine of its own in ten days.
    assert found.mtbf == pytest.approx((NODE_MTBF / 8 + 10 * DAY) / 10)
    assert found.mtbf / DAY == pytest.approx(4.3, abs=0.01)
    assert found.steps == 305  # sqrt(2 x 0.5 s x 4.3 d) = 610 s
    assert (found.interval, found.set_interval, found.set_steps) == (610.0, 2000.0, 1000)
    assert found.share == pytest.approx(0.00164, rel=0.01)
    assert found.set_share == pytest.approx(0.00294, rel=0.01)
    assert sentence(found) == (
        "interval: set 1000 steps (33.3 min), which costs 0.29% of the time; best 305 steps (10.2 min), 0.16% (Daly "
        "2006): a checkpoint costs 500 ms of training (500 ms blocked; mean of 4) and is durable after 20 s; a failure "
        "every 4.3 d (9 in 10 d on 8 nodes, and a prior of one in 264 node-days)"
    )
    plain = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (plain["steps"], plain["mtbf"]) == (305, 371500.0)


def test_without_failures_the_prior_counts_and_with_many_it_does_not() -> None:
    fresh = advise(history(failures=0, worked=0.0), 1000, 0)
    assert fresh is not None
    assert fresh.mtbf / DAY == pytest.approx(264 / 8, rel=0.001)
    often = advise(history(failures=1000), 1000, 0)
    assert often is not None
    assert often.mtbf == pytest.approx(10 * DAY / 1000, rel=4)


def test_a_save_that_is_not_yet_durable_holds_the_next_one_up() -> None:
    found = advise(history(saves=[Save(0.01, 3600.0)] * 3), 1000, 0)
    assert found is not None
    assert found.interval == 3600.0


def test_what_slowed_the_steps_is_a_cost_and_waiting_counts_once() -> None:
    assert slowed([2.5, 2.0], [1.9, 2.0, 2.1]) == pytest.approx(0.5)
    assert slowed([1.0], [2.0, 2.0, 2.0]) == 0.0
    assert slowed([9.0], [1.0, 1.0]) == 0.0  # too few to compare with
    found = advise(history(saves=[Save(0.5, 20.0, 0.7)]), 1000, 0)
    assert found is not None
    assert found.cost == 0.7


@pytest.mark.parametrize(
    ("interval", "minutes", "now"), [(1000, 0, 2000.0), (1000, 10, 600.0), (0, 50, 3000.0), (0, 0, None)]
)
def test_the_set_interval_is_whichever_comes_first(interval: int, minutes: float, now: float | None) -> None:
    found = advise(history(), interval, minutes)
    assert found is not None
    assert found.set_interval == now
    assert found.is_far == (now in (2000.0, 3000.0, None))
    assert ("none set" in sentence(found)) == (now is None)


def test_nothing_is_said_of_trials_and_of_what_costs_nothing() -> None:
    def advice(**changes: object) -> Advice:
        found = advise(history(**changes), 1000, 0)
        assert found is not None
        return found

    assert advice().is_far
    assert not advice(saves=[Save(0.5, 20.0)] * 2).is_far
    assert not advice(worked=500.0).is_far
    assert not advice(saves=[Save(0.001, 20.0)] * 4, failures=0).is_far
    assert advise(history(saves=[]), 1000, 0) is None
